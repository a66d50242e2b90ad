"""What a round costs on this device, which ratio fits its limits, and the owner's policy.

- `owner_policy` has the owner's limits, and `policy_guard` checks them while the agent runs.
- `cost_forecast` predicts a round from the board and from `cost_history`.
- `ratio_choice` picks the largest ratio that fits.
- `ratio_controller` combines these for one run.

Only `board_meter` and the guard's clock read sensors, so simulated devices decide by the same code.
"""
