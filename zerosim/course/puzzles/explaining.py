"""One sentence for whatever a run raised."""

import traceback

from zerosim.ranks.errors import PACKAGE, DeadlockError, MismatchError, OutOfMemoryError, PendingWorkError


def explained(where: str, error: BaseException) -> str:
    """The sentence, without its full stop, for what came out of a run on ``where``, as in ``N=3 (n=7)``."""
    match error:
        case DeadlockError():
            lines = [" ".join(line.split()) for line in str(error).splitlines()[1:-1]]
            return f"On {where} no rank can go on: {'; '.join(lines)}"
        case MismatchError():
            return f"On {where} {_first_sentence(str(error))}"
        case PendingWorkError() | OutOfMemoryError():
            return f"On {where} {_first_sentence(str(error))}"
    raised = next((note for note in getattr(error, "__notes__", ()) if note.startswith("raised by")), "")
    who = raised.removeprefix("raised by ").partition(" of ")[0] or "a rank"
    said = _first_sentence(_text(error))
    return f"On {where} {who} raised {type(error).__name__}{_line(error)}" + (f": {said}" if said else "")


def _text(error: BaseException) -> str:
    """What an error says; nothing where saying it fails."""
    try:
        return str(error)
    except Exception:
        return ""


def _line(error: BaseException) -> str:
    """`` in line 7 of ring``, of the innermost function that is not the package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((PACKAGE, "<frozen "))]
    return f" in line {frames[-1].lineno} of {frames[-1].name}" if frames else ""


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
