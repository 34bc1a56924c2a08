"""The model's chat template, rendered like in transformers, in a sandbox."""

from __future__ import annotations

import datetime
import json
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

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text, with all special tokens, BOS included."""
        if self._template is None:
            raise BadRequest("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise BadRequest(f"the chat template: {error}", param="messages") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)
