"""The cases of every method; every setting stands here, so that no default moves them."""

from tests.protocols.methods.rounds.cases import Case

FEDSPU = [
    Case(
        name="four ratios, a lost update, an absent device, early stopping",
        method="fedspu",
        settings={"early_stopping": True, "loss_weight": 0.7, "local_model": "full"},
        devices={"a": (10, 1.0), "b": (30, 0.25), "c": (20, 0.5), "d": (5, 0.75)},
        rounds=("abd", "abcd/abc", "acd", "abcd", "bcd", "abcd/acd", "abcd"),
        joins={"c": 2},
        note="a device whose L_t rose takes part no more; its last update counts",
    ),
    Case(
        name="without early stopping",
        method="fedspu",
        settings={"early_stopping": False, "loss_weight": 0.5, "local_model": "full"},
        devices={"a": (10, 0.5), "b": (30, 0.25), "c": (20, 0.5)},
        rounds=("abc", "ab", "c", "abc/b"),
        note="entries that nobody sent keep their value",
        seed=2,
    ),
]
SRP = {
    "num_rates": 5,
    "draws": 3,
    "decay": 0.8,
    "aggregation": "covered",
    "loss": "mean",
    "ranking": "model",
    "memory": True,
    "credit": "used",
    "loss_share": 1.0,
    "first": "shared",
    "downlink": "share",
}
SRP_PFED = [
    Case(
        name="memory over seven rounds",
        method="srp-pfed",
        settings=SRP,
        devices={"a": (10, 1.0), "b": (30, 1.0), "c": (20, 1.0), "d": (5, 1.0)},
        joins={"c": 3},
        rounds=("abd", "abd/ab", "acd", "bcd", "abcd/acd", "abd", "abcd"),
        note="c joins late and starts from the shared model of that round; devices choose other rates",
        seed=3,
        epochs=1,
        rate=0.1,
        spread=0.3,
        clusters=("abcd", "ab"),
    ),
    *(
        Case(
            name=name,
            method="srp-pfed",
            settings={**SRP, "num_rates": 4, **changed},
            devices={"a": (10, 1.0), "b": (30, 1.0), "c": (20, 1.0)},
            rounds=("abc", "ab", "abc/ac"),
            note=note,
            seed=seed,
        )
        for seed, (name, changed, note) in enumerate(
            [
                ("the proof's aggregation", {"aggregation": "delta", "credit": "drawn"}, "eq. 16"),
                ("ranked within each layer", {"ranking": "layer", "first": "own"}, "rate of every layer"),
            ],
            start=3,
        )
    ),
]
THIN = {"a": (10, 1.0), "b": (30, 0.5), "c": (20, 0.25)}
SRP_PFED += [
    Case(
        name="thin devices are sent a share",
        method="srp-pfed",
        settings={**SRP, "num_rates": 4},
        devices=THIN,
        joins={"c": 2},
        rounds=("ab", "abc", "bc", "abc/ac"),
        note="b and c share among the `entries` that they are sent",
        seed=5,
    ),
    Case(
        name="thin devices are sent all, and try rates that fit",
        method="srp-pfed",
        settings={**SRP, "num_rates": 4, "downlink": "whole"},
        devices=THIN,
        rounds=("abc", "abc", "bc/b"),
        note="no rate above the device's ratio",
        seed=6,
    ),
]
COACHING = {
    "coaching": 0.4,
    "equal_sharing": 0.05,
    "step": "plain",
    "relation_rate": 0.03,
    "relation_steps": 1,
    "safe_step": False,
    "rows": "clip",
    "downlink": "share",
}
BLS = {**COACHING, "self_threshold": 0.4, "search": "largest", "targets": "uploaded"}
KAPC = [
    Case(
        name="slices, a lost update, a late joiner",
        method="kapc",
        settings=COACHING,
        joins={"b": 3},
        rounds=("acd", "acd", "abcd", "bd/b", "abcd/abd", "abcd"),
        note="b comes into the middle of the cube in round 3",
    ),
    Case(
        name="steps per layer, projected, at three ratios",
        method="kapc",
        settings={**COACHING, "step": "per-layer", "relation_rate": 1.0, "rows": "simplex"},
        devices={"a": (10, 1.0), "b": (10, 0.4), "c": (10, 0.7), "d": (10, 1.0)},
        rounds=("abcd", "abc/ab", "bcd", "abcd"),
        note="b exchanges one layer of three, c two; the layers above are mixed without them",
        seed=4,
    ),
    Case(
        name="layer selection both ways",
        method="kapc-bls",
        settings=BLS,
        rounds=("abcd", "abcd", "abc/ab", "abd", "abcd", "acd", "abcd"),
        note="a layer whose own share is above 0.4 is not sent down; Omega is 1 and 3, too, and 2 after 3",
        seed=39,
    ),
    Case(
        name="targets for all layers",
        method="kapc-bls",
        settings={**BLS, "targets": "all"},
        rounds=("abc", "abc", "ac", "abc"),
        devices=dict.fromkeys("abc", (10, 1.0)),
        note="also for layers that the device did not send up",
        seed=3,
    ),
]
PURIN = {
    "tau": 0.5,
    "beta": 3,
    "gradient": "last-batch",
    "second_order": False,
    "all_zero": "keep",
    "average": "devices",
    "weighted": False,
    "personal": "trained",
    "downlink": "share",
}
FEDPURIN = [
    Case(
        name="before and beyond beta",
        method="fedpurin",
        settings=PURIN,
        joins={"c": 3},
        rounds=("abd", "abd/ab", "abcd", "abcd", "bc/b", "abcd"),
        note="collaboration until round 3; c joins late; d's update of round 2 is lost, c's of round 5",
        zero=True,
    ),
    Case(
        name="change of weights, second order, little that is critical",
        method="fedpurin",
        settings={
            **PURIN,
            "tau": 0.3,
            "beta": 4,
            "gradient": "change",
            "second_order": True,
            "all_zero": "omit",
        },
        devices=dict.fromkeys("abc", (10, 1.0)),
        rounds=("abc", "ab", "abc/bc", "abc"),
        note="biases of two entries have none that are critical; a tensor of zeros is left out",
        seed=2,
        zero=True,
    ),
]
FEDPURIN.append(
    Case(
        name="thin devices are sent a share of bar",
        method="fedpurin",
        settings=PURIN,
        devices={"a": (10, 1.0), "b": (30, 0.35), "c": (20, 0.2)},
        rounds=("abc", "abc", "ab/a", "abc", "abc"),
        note="b and c keep their own where bar is not sent, and have fewer critical entries",
        seed=3,
    )
)
GROUPS = {
    "dynamic": True,
    "gamma": 1.0,
    "gamma_step": 0.2,
    "start_rounds": 2,
    "window": 1,
    "observe": 1,
    "hold_rounds": 1,
    "tau": 1,
    "alpha": 3,
    "low_discrepancy": 1.0,
    "frequent_share": 0.3,
    "layer_intervals": True,
}
DC_PFL = [
    Case(
        name="layers that wait, a split by a trial that is won",
        method="dc-pfl",
        settings=GROUPS,
        devices={"a": (10, 1.0), "b": (20, 1.0), "c": (30, 1.0), "d": (5, 1.0)},
        rounds=("abcd", "abcd/abd", *["abcd"] * 6, "abd", "abcd/bcd"),
        clusters=("ab", "cd"),
        spread=0.2,
        note="rounds of whole uploads go before and after a trial",
    ),
    Case(
        name="a trial that is lost, held off and won",
        method="dc-pfl",
        settings={**GROUPS, "low_discrepancy": 0.8, "hold_rounds": 2},
        devices={"a": (1, 1.0), "b": (30, 1.0), "c": (10, 1.0), "d": (20, 1.0), "e": (10, 1.0)},
        joins={"e": 11},
        rounds=("abcd", "abcd", "abcd", "abc", "bcd", "bcd", *["abcd"] * 4, "abcde", "abcde"),
        clusters=("abcd",),
        epochs=1,
        rate=0.2,
        seed=2,
        note="the group of a, whose update is not there in round 5, and the others; e joins later, a guest",
    ),
    Case(
        name="fixed groups and a ratio",
        method="dc-pfl",
        settings={**GROUPS, "dynamic": False, "gamma": 0.7, "alpha": 2},
        devices={"a": (10, 1.0), "b": (10, 0.7), "c": (10, 1.0)},
        rounds=("abc", "abc", "abc", "ab", "abc"),
        clusters=("ab",),
        spread=0.4,
        note="the paper's NoDC; b exchanges the smallest layers that make up 0.7 of the model",
        seed=2,
    ),
    Case(
        name="the most discrepant layers that fit go every round",
        method="dc-pfl",
        settings={**GROUPS, "low_discrepancy": "auto", "frequent_share": 0.5},
        devices={"a": (10, 1.0), "b": (20, 1.0), "c": (30, 1.0), "d": (5, 1.0)},
        rounds=("abcd", *["abcd"] * 8),
        clusters=("ab", "cd"),
        spread=0.2,
        note="layers are measured only where all were averaged equally long ago",
    ),
]
CASES = [*FEDSPU, *SRP_PFED, *KAPC, *FEDPURIN, *DC_PFL]
