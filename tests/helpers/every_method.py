"""Every method, with its defaults and in its other forms: (name, settings)."""

from fleetune.protocols.methods import REGISTRY

SETTINGS = [
    *((name, {}) for name in REGISTRY),
    ("fedspu", {"early_stopping": True}),
    ("fedspu", {"local_model": "sub-model"}),
    ("srp-pfed", {"aggregation": "delta", "ranking": "layer"}),
    ("srp-pfed", {"aggregation": "literal", "loss": "sum", "draws": 5, "num_rates": 4}),
    (
        "fedpurin",
        {"beta": 1, "average": "coverage", "weighted": True, "all_zero": "omit", "personal": "sparse"},
    ),
    ("fedpurin", {"gradient": "change", "second_order": True, "tau": 0.2}),
    ("kapc", {"rows": "simplex", "relation_steps": 3, "safe_step": True}),
    ("kapc-bls", {"search": "literal", "self_threshold": 0.2}),
    ("kapc-bls", {"targets": "all"}),
    ("kapc-bls", {"step": "per-layer", "self_threshold": 0.2}),
    ("pfedla", {"kept_layers": 1, "rate": 0.1}),
    ("cd2-pfed", {"growth_rounds": 1, "strength": 0.5}),
    ("cd2-pfed", {"strength": 0.0}),
    ("perfedmask", {"fine_tuning_epochs": 2}),
    ("lg-fed", {"global_layers": "auto"}),
    ("fedbabu", {"fine_tuned": "all"}),
    ("per-fedavg", {"approximation": "first-order", "steps": 2}),
    ("per-fedavg", {"approximation": "hessian-free"}),
    ("ditto", {"personal_epochs": 3}),
    ("fedamp", {"form": "cosine"}),
    ("fedcac", {"beta": 1, "tau": 0.2}),
    ("lotteryfl", {"threshold": 0.99, "rate": 0.5}),
    ("clusterfl", {"num_groups": 1, "shrink": 0.2, "attract": 0.1}),
    ("clusterfl", {"solver": "admm", "num_groups": 2, "regroup_rounds": 2}),
    ("clusterfl", {"solver": "admm", "relations": "soft", "shrink": 0.2, "attract": 0.1}),
    ("dc-pfl", {"dynamic": False, "gamma": 0.5, "start_rounds": 1}),
    ("dc-pfl", {"start_rounds": 1, "gamma": 0.9, "window": 1, "observe": 1, "tau": 2, "alpha": 2}),
    ("dc-pfl", {"start_rounds": 1, "low_discrepancy": "auto", "frequent_share": 0.3}),
]
