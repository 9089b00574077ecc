"""Names of hub models, and what can go wrong between here and the hub, in our words."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from dragoman.errors import DragomanError, FetchError, SubjectError

_NAME = re.compile(r"^(?P<prefix>hf:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")
_BARE = re.compile(r"^hf:(?P<repo>[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")


@dataclass(frozen=True)
class HubName:
    """A repository on the hub and the revision asked for."""

    repository: str
    revision: str | None


def parse_hub_name(name: str, revision: str | None = None) -> HubName | None:
    """`hf:ORG/NAME[@revision]`, `hf:NAME` or `ORG/NAME`; None where the name cannot be a hub name.

    Raises:
        SubjectError: two different revisions are given.
    """
    match = _NAME.match(name) or _BARE.match(name)
    if match is None or name.startswith((".", "/", "~")):
        return None
    written = match["revision"]
    if written and revision and written != revision:
        raise SubjectError(
            f"the name says revision {written} and the argument {revision}",
            expected="one revision",
            consequence="it would be unclear which weights were read",
            remedy="give the revision once",
        )
    return HubName(match["repo"], written or revision)


def hub_answers() -> bool:
    """Whether the model hub can be reached, asked once.

    Its client tries every file again for half a minute, and transformers asks it for several: without this
    question a machine with no network would wait for minutes, even for a model in the local cache.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.DEFAULT_REQUEST_TIMEOUT)
    except Exception as error:
        if isinstance(error, OSError) or is_http_error(error):
            return False
        raise
    return True


def is_http_error(error: Exception) -> bool:
    """Whether the hub's HTTP client raised it; by name, as releases of the hub client use different ones."""
    return any(kind.__module__.partition(".")[0] in ("httpx", "httpx2") for kind in type(error).__mro__)


@contextmanager
def explained(reference: str, hub: HubName | None) -> Generator[None]:
    """Turn what transformers and the hub client raise while loading into our errors."""
    try:
        yield
    except DragomanError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
        raise _explain(reference, hub, error) from error


def _explain(reference: str, hub: HubName | None, error: Exception) -> DragomanError:
    kinds = _kinds_in_chain(error)
    text = str(error)
    if hub is not None and kinds & {"RepositoryNotFoundError", "GatedRepoError"}:
        return _no_such_repository(reference)
    if hub is not None and "RevisionNotFoundError" in kinds:
        return SubjectError(
            f"{reference} has no revision {hub.revision}",
            expected="a branch, tag or commit of that repository",
            consequence="other weights than asked for would be read",
            remedy="check the revision on the model's page",
        )
    if hub is not None and _is_connection_trouble(kinds, text):
        return _no_connection(reference)
    if "trust_remote_code" in text:
        return SubjectError(
            f"{reference} brings its own Python code",
            expected="a model whose architecture is part of transformers",
            consequence="code from the model's repository would run on this machine",
            remedy="read that code first; then load it from Python with trust_remote_code=True",
        )
    if "use_safetensors" in text or "no file named model.safetensors" in text:
        return SubjectError(
            f"{reference} has no safetensors weights",
            expected="weights as .safetensors",
            consequence="a pickle can run any code when it is opened",
            remedy="use a repository or revision with safetensors",
        )
    return SubjectError(
        f"{reference} cannot be loaded: {_first_line(error)}",
        expected="a decoder-only language model that this version of transformers knows, with its tokenizer",
        consequence="there would be no model to read",
        remedy="check that the folder or repository is complete and that transformers is recent enough",
    )


def _kinds_in_chain(error: BaseException) -> set[str]:
    kinds: set[str] = set()
    link: BaseException | None = error
    while link is not None:
        kinds |= {kind.__name__ for kind in type(link).__mro__}
        link = link.__cause__ or link.__context__
    return kinds


def _is_connection_trouble(kinds: set[str], text: str) -> bool:
    trouble = {
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ConnectError",
        "ConnectionError",
        "TimeoutException",
        "ProxyError",
    }
    words = ("connect to", "offline mode", "client has been closed", "internet connection")
    return bool(kinds & trouble) or any(word in text for word in words)


def _no_such_repository(reference: str) -> SubjectError:
    return SubjectError(
        f"the hub knows no model {reference}, or it is gated and you have no access",
        expected="an existing repository that you may read",
        consequence="there would be no model to read",
        remedy="check the spelling; for a gated model accept its terms on its page, then `hf auth login`",
    )


def _no_connection(reference: str) -> FetchError:
    return FetchError(
        f"the model hub cannot be reached and {reference} is not in its local cache",
        expected="a network connection, or a model that was downloaded before",
        consequence="there would be no model to read",
        remedy="connect, or copy the model folder here and give its path, or use the embedded smollm2-135m",
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
