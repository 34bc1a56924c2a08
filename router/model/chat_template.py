"""The model's chat template, rendered like in transformers, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.protocol import BadRequest

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled template. Rendering raises `BadRequest` for messages that it refuses."""

    def __init__(self, source: str | None, *, bos_token: str | None, eos_token: str | None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = None if source is None else environment.from_string(source)
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._taken = {"messages", *self._special, *environment.globals}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """Return the prompt text, with all special tokens, BOS included.

        `variables` are the client's. Raises `BadRequest` for a variable with a name that is taken,
        and if the template fails: it is the model's, so what the client sent made it fail.
        """
        if self._template is None:
            raise BadRequest("this model has no chat template: use /v1/completions")
        if taken := sorted(self._taken & variables.keys()):
            message = f"chat_template_kwargs: the name {taken[0]} is reserved"
            raise BadRequest(message, param="chat_template_kwargs")
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**variables, **own, **self._special})
        except Exception as error:  # noqa: BLE001  an expression of a template may raise anything
            raise BadRequest(f"the chat template: {_said(error)}", param="messages") from None


def _said(error: Exception) -> str:
    too_deep = isinstance(error, RecursionError)
    return "a value is nested too deeply" if too_deep else str(error)[:1000]


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)
