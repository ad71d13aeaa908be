"""Shaping of rewards before advantages are taken."""


def overlong_penalty(length: int, *, longest: int, zone: int) -> float:
    """What a long completion's score loses: 0 to 1.

    0 up to `longest - zone` tokens, then linearly up to 1 at `longest`: DAPO (arXiv 2503.14476, equation 13),
    whose L_max is `longest` and L_cache is `zone`.

    Args:
        length: tokens of the completion.
        longest: length at which completions are cut.
        zone: tokens over which the penalty grows; 0 is off.
    """
    if zone == 0:
        return 0.0
    return min(1.0, max(0.0, (length - (longest - zone)) / zone))
