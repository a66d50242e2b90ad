"""What a round may cost and will cost on this device, which ratio therefore fits, and the owner's policy.

`owner_policy` says what the owner allows, `policy_guard` watches it while the agent runs, `cost_forecast`
predicts a round from the board and from `cost_history`, `ratio_choice` picks the largest ratio that fits, and
`ratio_controller` holds all of that for one run. But for `board_meter` and the guard's clock nothing here
reads a sensor, so that simulated devices decide by the same code.
"""
