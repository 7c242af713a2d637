"""Which model `run` means.

The first argument is the model if it has the form of one (owner/name, name:tag, hf.co/..., a path that exists), or if it is a bare
word that is the name of a model at hand. Otherwise all arguments are the prompt, for the default model. A bare word that is nearly
a name is refused: taking a mistyped name for a prompt would answer the wrong question with the wrong model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cavectl.names import DEFAULT_MODEL
from cavectl.prompt import clean
from engine.errors import InvalidRequest, ModelNotFound

_PART = r"[^\s:/?!,;\"'()]+"
_NAME = re.compile(rf"{_PART}(?:[:/]{_PART})+")
_BARE = re.compile(_PART)
_FAMILY = DEFAULT_MODEL.partition(":")[0]  # an alias of it in the catalog
_PATH_STARTS = ("/", "./", "../", "~/")
_NEAR = 0.75


def split_target(words: Sequence[str], known_names: Callable[[], Sequence[str]]) -> tuple[str, list[str]]:
    """The model (a name or a path) and the words of the prompt. `known_names` is only called for a bare first word."""
    if not words:
        return DEFAULT_MODEL, []
    first, *rest = words
    if is_path(first):
        if Path(first).expanduser().exists():
            return first, rest
        if not any(letter.isspace() for letter in first):
            raise ModelNotFound(f"no file or folder {first}", hint="to send it as a prompt: cavectl run --model NAME ...")
    if _NAME.fullmatch(first):
        return first, rest
    if _BARE.fullmatch(first):
        name = _known(first, [DEFAULT_MODEL, *known_names()])
        if name:
            return name, rest
    return DEFAULT_MODEL, list(words)


def model_name(argument: str) -> str:
    """An argument that names a model. What may be a name beyond that is for the daemon to say."""
    if not argument.strip():
        raise InvalidRequest("the model's name is empty", hint="a name looks like smollm2:135m; cavectl list shows what is here")
    return clean(argument)


def is_path(model: str) -> bool:
    return model.startswith(_PATH_STARTS)


def _known(word: str, names: Sequence[str]) -> str | None:
    """The model of that name, None when the word is no name. Raises ModelNotFound when it is nearly one."""
    asked = word.casefold()
    by_form = {form.casefold(): name for name in names for form in (name, name.removesuffix(":latest"))}
    by_form.setdefault(_FAMILY, DEFAULT_MODEL)
    if asked in by_form:
        return by_form[asked]
    from difflib import get_close_matches

    near_forms = {form.casefold(): name for name in names for form in (name, name.rsplit("/")[-1].split(":")[0])}
    near = get_close_matches(asked, near_forms, n=1, cutoff=_NEAR)
    if near:
        raise ModelNotFound(
            f"no model is called {word!r}",
            hint=f"did you mean {near_forms[near[0]]}? To send it as a prompt: cavectl run --model NAME {word} ...",
        )
    return None
