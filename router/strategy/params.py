"""The parameters of a strategy: keyword-only parameters of its function, typed by annotations."""

from __future__ import annotations

import inspect
import reprlib
import typing
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from engine.protocol import BadRequest

__all__ = ["Params"]

_shown = reprlib.Repr()  # bounded in length and depth
_shown.maxstring = _shown.maxother = 200


class Params:
    """The parameters of a strategy's function. Raises `TypeError` if that is no strategy.

    Bounds and help come from the annotation, such as
    `Annotated[float, Field(ge=0, le=1, description=…)]`; choices are a `Literal`. Values are
    validated strictly, as JSON: neither `"1"` nor `true` is a number.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", repr(function))
        self._types: dict[str, TypeAdapter[Any]] = {}
        self._defaults: dict[str, Any] = {}
        self._described: dict[str, dict[str, Any]] = {}
        hints = typing.get_type_hints(function, include_extras=True)
        positional = 0
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                positional += 1
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                raise TypeError(f"{name}: a strategy takes no *args or **kwargs")
            elif parameter.default is parameter.empty:
                raise TypeError(f"{name}: the param {parameter.name} needs a default")
            else:
                self._add(name, parameter.name, hints.get(parameter.name, Any), parameter.default)
        if positional != 2:
            raise TypeError(
                f"{name}: a strategy takes (request, cluster), then keyword-only params"
            )

    def _add(self, function: str, name: str, hint: Any, default: Any) -> None:
        try:
            kind: TypeAdapter[Any] = TypeAdapter(hint)
            schema = kind.json_schema()
            schema.pop("title", None)
            self._types[name] = kind
            self._defaults[name] = self._read(name, default)
            shown = kind.dump_python(self._defaults[name], mode="json")
            self._described[name] = {**schema, "default": shown}
            orjson.dumps(self._described[name])
        except (PydanticUserError, PydanticSerializationError) as wrong:
            message = str(wrong).partition("\n")[0]
            raise TypeError(f"{function}: the param {name}: {message}") from None
        # Half of a surrogate pair, or an integer of more than 64 bits.
        except orjson.JSONEncodeError as wrong:
            raise TypeError(f"{function}: the param {name}: {wrong}") from None
        except ValidationError as wrong:
            raise TypeError(f"{function}: the default of {name}: {_says(wrong, kind)}") from None

    def validate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` and other defaults. Raises `BadRequest` for the first invalid value."""
        checked = dict(self._defaults)
        for name, value in values.items():
            if name not in self._types:
                known = ", ".join(self._types) or "none"
                raise BadRequest(
                    f"no parameter {name!r}; there are: {known}", param=f"params.{name}"
                )
            try:
                checked[name] = self._read(name, value)
            # Also values that are nested too deeply, and integers of more than 64 bits.
            except (ValueError, orjson.JSONEncodeError) as wrong:
                kind = self._types[name]
                says = _says(wrong, kind) if isinstance(wrong, ValidationError) else str(wrong)
                raise BadRequest(
                    f"{name}={_shown.repr(value)}: {says}", param=f"params.{name}"
                ) from None
        return checked

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each parameter.

        It has `type`, `default`, bounds (`minimum`, `enum`, …) and help (`description`).
        """
        return self._described

    def _read(self, name: str, value: Any) -> Any:
        kind = self._types[name]
        read = kind.validate_json(to_json(value), strict=True)
        orjson.dumps(kind.dump_python(read, mode="json"))  # so that the admin API can show it
        return read


def _says(invalid: ValidationError, kind: TypeAdapter[Any]) -> str:
    errors = invalid.errors(include_url=False, include_input=False)
    if kind.core_schema["type"] == "union":
        return ", or ".join(dict.fromkeys(error["msg"] for error in errors))
    where = ".".join(str(part) for part in errors[0]["loc"])
    return f"{where}: {errors[0]['msg']}" if where else str(errors[0]["msg"])
