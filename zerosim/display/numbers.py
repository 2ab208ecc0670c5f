"""Numbers as texts and tables write them."""


def short(value: float) -> str:
    """The shortest decimal of a number, without a useless ``.0``."""
    return str(value).removesuffix(".0")


def rough(value: float, digits: int = 3) -> str:
    """The first few digits of a number."""
    return f"{value:.{digits}g}"


def fitted(value: float, columns: int = 10) -> str:
    """As many digits of a number as these columns hold, and no more than nine, which tell any two fp32 apart."""
    texts = (rough(value, digits) for digits in range(9, 2, -1))
    return next((text for text in texts if len(text) <= columns), rough(value))


def percent(share: float) -> str:
    """``100.1 %``; whole percents without a useless ``.0``."""
    return f"{100 * share + 0.0:.1f}".removesuffix(".0") + " %"


def sum_text(a: float, b: float) -> str:
    """``1 + 1e-05``, or ``1 - 0.0003``."""
    return f"{short(a)} {'-' if b < 0 else '+'} {short(abs(b))}"
