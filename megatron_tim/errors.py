"""The one exception a user should ever see: a sentence that says what is wrong and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake or a state of the machine that the user can mend.

    The message is one sentence: which key, file or value, what is allowed, what to do.
    The command line prints it without a traceback and exits with status 2.
    """


_OUT_OF_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EFBIG: "the file size limit was reached",
    errno.EDQUOT: "the disk quota is used up",
}
# The last two are torch's serializer, which forgets the errno of a write that came back short.
_OUT_OF_SPACE_WORDS = ("no space left", "file too large", "quota exceeded", "unexpected pos", "failed writing file")


# A lock that is held and a path that is taken are answers, which callers put into words of their own.
_MEANT_FOR_CALLERS = (BlockingIOError, FileExistsError, NotADirectoryError)


def space_problem(error: BaseException) -> str | None:
    """Says how the disk ran out, when that is what ``error`` (or what caused it) reports."""
    while error is not None:
        number = getattr(error, "errno", None)
        if number in _OUT_OF_SPACE:
            return _OUT_OF_SPACE[number]
        text = str(error).lower()
        if any(words in text for words in _OUT_OF_SPACE_WORDS):
            return "the disk is full or a file size limit was reached"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns a failed write of ``path`` into a :class:`UserError` that names the file and the reason.

    Libraries report a full disk in many types (OSError, RuntimeError, their own); what they share
    is the errno or its words, and both are looked for along the chain of causes.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        problem = space_problem(error)
        if problem is not None:
            raise UserError(f"cannot write {path}: {problem}; free some space or write elsewhere.") from error
        if isinstance(error, OSError) and error.strerror and not isinstance(error, _MEANT_FOR_CALLERS):
            raise UserError(f"cannot write {path}: {error.strerror.lower()}; choose another place.") from error
        raise
