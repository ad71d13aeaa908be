"""What can go wrong between processes."""


class ClusterError(ValueError):
    """The cluster cannot be had, or gave up; the text says what to do."""


class RankDiedError(RuntimeError):
    """A trainer rank has ended or hangs, and with it the others cannot go on."""


class EnginesLostError(RuntimeError):
    """Every engine has ended at once; those started in their place serve older weights."""


class WeightsGoneError(RuntimeError):
    """The trainer cannot give the weights that the engines serve: it trains, or has others by now."""
