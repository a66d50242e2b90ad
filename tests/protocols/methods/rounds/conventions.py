"""What the vectors' files say of themselves: how rounds are played, and what each method's rounds note."""

COMMON = """
Whole rounds of one run. `initial` is the flat model: every tensor of `model` in order, row by row, running
statistics (kind stat) last; `neurons` says for each axis to which group of neurons it belongs. A device is
admitted at the start of round `joins` and starts from `initial`. In each of `rounds` the `participants`
work; of these the updates of the `arrived` are aggregated, the others' are lost, though those devices go on
from what they trained. Local training is exact: `epochs` times each parameter that may change goes down by
`rate` times (w - train target) + 2 * strength * (w - what it is pulled towards); the gradient of the last
batch is w - target before the last step, without the pull; then each running statistic is halved and takes
on the device's `number`. The loss is the mean over the parameters of (w - target)^2 / 2; `validation` is
the target of that part. `plan` is what goes down to each device, `updates` what it sends up, `kept` its
model after training; all else is what is known after the round. A `mask` has a 0 or 1 for each parameter.
Values that go up are those of `kept`; those that go down are in `values`, or of the model that the round
before notes. Numbers are those of float64, rounded; whatever is compared differs by more than 1e-5 of
itself or is equal.
"""
PAPERS = {
    "fedspu": "FedSPU (Niu, Dong, Qin 2024), Algorithms 1 and 2, Fig. 9",
    "srp-pfed": "SRP-pFed (Hu et al.), Algorithms 1 and 2, eq. 4 to 8",
    "kapc": "KAPC (Zhi et al. 2024), Algorithms 1 and 2, eq. 11 to 15",
    "kapc-bls": "KAPC with BLS (Zhi et al. 2024), Algorithms 3 to 6, eq. 29 to 34",
    "fedpurin": "FedPURIN (Xie, He, Shi), Algorithm 1, eq. 7 to 11, sections 3.3 and 4.5",
    "dc-pfl": "DC-PFL (Liu, Huang, He, Cao), sections III and IV, eq. 3 to 6",
}
_CUBE = """
R is sliced to the participants, normalised, stepped and normalised, written back, and each participant's
row normalised; who never sent anything stands at `initial`; a late joiner gets 1/N of every row and its own
rows are uniform. Layers are those with weights, with their bias; norm layers are not pulled. `cube` is R,
shape (N, layers, N), over the devices admitted so far in order; `shared` is the mean of all layers as last
heard, over the devices heard from, `initial` elsewhere. At a ratio below 1 a device exchanges the first
max(1, floor(ratio * L)) layers, and each layer is related and mixed among those that exchange it. With step
= per-layer weights are taken less the participants' mean, and eta is divided by 2 * lambda * (largest
eigenvalue of their Gram matrix) + beta.
"""
ROUNDS = {
    "fedspu": """
`neurons` of a round are the active ones, drawn at random, of each group. `stopping_loss` is L_t after
training; who has `stopped` leaves after this update, and is no participant any more.
""",
    "srp-pfed": """
`uniforms` of a round are the numbers in (0, 1] behind its K draws. `rates` are tried in this order. A
device that works for the first time starts from the shared parameters. `loss` is that of the chosen mixture
before training, `rate` the one it was made with, told where credit = used; h grows by 1 - sigmoid of the
mean loss of the updates that arrived. With downlink = share only `entries` go down to a device of a ratio
below 1; it takes all others as its own, and ranks its weights among these.
""",
    "kapc": _CUBE,
    "kapc-bls": f"""{_CUBE}
`visits` are B, tau and Omega as devices remember them. With targets = uploaded only the layers of the
latest update that arrived get a target, all of them before there is one.
""",
    "fedpurin": """
Only what a device cannot know goes down: no 0 of bar, and its own critical entries only where others
collaborate. Who was absent from the last round keeps its critical entries and takes bar elsewhere; so does
a device whose latest update did not arrive, but for its own weights where bar is 0 or its last update that
did arrive was critical. `shared` is bar, with `initial` at norm layers; `collaborating` devices had others
in C_i. A device whose ratio is below tau has that tau, and with downlink = share is sent bar at `entries`
only; elsewhere it keeps its own.
""",
    "dc-pfl": """
`kept` is noted in the last round only.
A device gets the layers averaged since the round in which its last update arrived, or ever if there is
none; alone in its group, none. After a round of whole uploads the trial's round sends both models, of which
`trial` is the new group's; devices report both losses after training and no weights. The winner is adopted
and sent whole in the next round (phase settle), whose loss does not count for the curve, which is the mean
of every device's latest loss. Averages are by samples. `groups` are named by their first member; `phase` is
that of the next round; a guest starts from the mean of the groups and comes into the nearest one. A
`low_discrepancy` of "auto": by falling D_gl (eq. 5) layers go every tau rounds that still fit into
`frequent_share` of the parameters, or the first of them; measured where all were averaged equally long ago.
""",
}


def convention(method: str) -> str:
    """Of a method's file, on one line."""
    return " ".join(f"{COMMON} {ROUNDS[method]}".split())
