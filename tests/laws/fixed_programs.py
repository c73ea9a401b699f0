"""Programs that were written by hand, for tests of amp and of the file that ``migrate --to native`` copies."""

CONFIG = {
    **dict.fromkeys(["bfloat16", "masters", "batchnorm", "minimum"]),
    **dict.fromkeys(["groups", "frozen"], ()),
    "loss_scale": "dynamic",
    "maximum": 2.0**10,
    "losses": 1,
    "window": 2000,
    "models": [["linear"], ["linear"]],  # three weights each, the first unused
    "owners": [0, 0, 0, 1, 1, 1],
    "late": [None] * 6,
    "sharers": [()] * 6,
    "optimizers": ["momentum", "sgd"],
}


def block(*optimizers, paths=((0,), (1,)), **more):
    """A block that reaches both models, for some of the optimizers."""
    step = {"do": "block", "optimizer": 0, "optimizers": optimizers, "paths": paths, "data": 0, "size": 2.0**-6}
    step |= {"loss_id": 0, "passes": 1, "delay_unscale": False, "delay_overflow_check": False}
    return {**step, "raises": None, "inside": [], "late": False, **more}


def step(optimizer):
    return {"do": "step", "optimizer": optimizer, "asks": True}


def clear(who, how, weight=1):
    return {"do": "clear", "optimizer": 0, "model": 0, "weight": weight, "who": who, "how": how}


CLEARED = [clear(who, how) for who in ("model", "all", "one") for how in ("none", "zeros")]
STALE = {
    **{f"cleared after the step: {c['who']} {c['how']}": [block(0), step(0), c, step(0)] for c in CLEARED},
    **{f"cleared before the step: {c['who']} {c['how']}": [block(0), c, step(0)] for c in CLEARED},
    **{f"cleared between blocks: {c['who']} {c['how']}": [block(0), c, block(0), step(0)] for c in CLEARED},
    "stepped twice": [block(0), step(0), step(0)],
    "a block for one of two": [block(0), block(1), step(0), step(1), block(0), step(0), step(1)],
    "a block for one of two, cleared": [block(0), step(0), clear("all", "none"), block(0), step(0), step(1)],
    "no block of its own": [block(1), step(0)],
    "no block of its own, a generator": [block(1, paths=[[0, 1]]), step(0), step(1)],
}


# The three weights of the first model are held by both optimizers.
SHARED = {**CONFIG, "sharers": [(1,)] * 3 + [()] * 3}
LATER = {**CONFIG, "late": [1] * 3 + [None] * 3, "optimizers": ["sgd", "fused"]}
THREE = {**CONFIG, "models": [["linear"]] * 3, "owners": [0, 0, 0, 1, 1, 1, 2, 2, 2], "window": 1, "maximum": 2.0**17}
THREE |= {"sharers": [()] * 9, "late": [None] * 9, "optimizers": ["sgd", "fused", "momentum"]}
JOIN = {"do": "join", "optimizer": 1}
OF_BOTH = block(0, 1)
CLEARED_BY_THE_OTHER = {"do": "clear", "optimizer": 1, "who": "optimizer", "how": "none"}
TOGETHER = {
    "an overflow in a block of both": (CONFIG, [block(0, 1, size=float("inf")), step(1), step(0), OF_BOTH, step(1)]),
    "the same, delayed": (CONFIG, [block(0, 1, size=float("inf"), delay_unscale=True), step(1), step(0)]),
    "a step in the block of another": (SHARED, [block(0, inside=[step(1)], late=True), step(0), step(1)]),
    "the same, accumulated": (SHARED, [OF_BOTH, block(0, inside=[step(1)], late=True), step(0), step(1)]),
    "cleared by hand, one of both has stepped": (
        SHARED,
        [OF_BOTH, step(1), clear("all", "none"), block(0), OF_BOTH, step(0), step(1)],
    ),
    "cleared in the block of another": (SHARED, [OF_BOTH, block(0, inside=[CLEARED_BY_THE_OTHER]), step(0)]),
    "cleared while others wait": (SHARED, [block(0), block(0, delay_unscale=True), CLEARED_BY_THE_OTHER, step(0)]),
    "one accumulation ended, another gone on with": (
        THREE,
        [
            block(0, paths=[[0]], delay_unscale=True),
            block(1, 2, paths=[[1], [2]], delay_unscale=True),
            block(0, 1),
            *map(step, range(3)),
        ],
    ),
    "shared after an overflow": (LATER, [block(0, size=float("inf")), JOIN, step(1), step(0), OF_BOTH, step(1)]),
    "shared after a skipped step": (
        LATER,
        [block(0, size=float("inf")), step(0), JOIN, step(1), clear("all", "none"), OF_BOTH, step(1)],
    ),
}
