"""Models of the bodies that clients send. They validate the bodies and describe them.

Unknown fields are ignored, as in vLLM, since clients of many servers send them. The parser checks
fields marked `SkipValidation` itself: prompts may be long.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, SkipValidation
from pydantic_core import PydanticCustomError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "Message",
    "StructuredOutputs",
    "TextFormat",
    "TextPart",
    "TokenizeChatRequest",
    "TokenizeRequest",
]

SEED_FROM, SEED_TO = -(2**63), 2**64 - 1
MOST_BIAS = 100.0


class _FirstOnly(FailFast):
    """Ends with the first bad element: each would cost the time and the memory of an error."""

    def __hash__(self) -> int:  # a member of a union is hashed
        return hash(self.fail_fast)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    for token, bias in value.items() if isinstance(value, dict) else ():
        if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            return {token: bias}  # its error is enough
    return value


def _seed(value: Any) -> Any:
    if value is not None and (type(value) is not int or not SEED_FROM <= value <= SEED_TO):
        message = "a whole number from -2**63 to 2**64 - 1"
        raise PydanticCustomError("seed", message)
    return value


Text = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Text], _FirstOnly(), Field(max_length=16)]
Stop = Annotated[Stops, BeforeValidator(_listed, json_schema_input_type=Text | Stops)]
Seed = Annotated[int, Field(ge=SEED_FROM, le=SEED_TO), BeforeValidator(_seed)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], _FirstOnly()]
Biases = dict[str, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]]
Prompt = (
    Text
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Text | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="a last chunk with the usage")


class TextFormat(_Body):
    type: Literal["text"]


class JsonObjectFormat(_Body):
    type: Literal["json_object"]


class JsonSchema(_Body):
    name: str | None = Field(None, max_length=128)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(None, description="false: objects may have further properties")


class JsonSchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(_Body):
    """vLLM's extension: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], _FirstOnly(), Field(min_length=1)] | None = None
    grammar: Text | None = Field(None, description="GBNF, or Lark if there is no ::= in it")
    json_object: bool | None = None


class GenerateRequest(_Body):
    """What completions and chat have in common. A null field counts as left out."""

    model: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower: earlier")
    timeout: float | None = Field(None, gt=0, description="seconds it may take in all")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all")
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    logit_bias: Annotated[Biases, BeforeValidator(_biases)] | None = Field(
        None, description="by token id"
    )
    response_format: SkipValidation[ResponseFormat | None] = None
    structured_outputs: SkipValidation[StructuredOutputs | None] = None
    guided_json: SkipValidation[str | dict[str, Any] | bool | None] = None
    guided_regex: SkipValidation[Text | None] = None
    guided_choice: SkipValidation[list[Text] | None] = None
    guided_grammar: SkipValidation[Text | None] = None
    return_token_ids: bool | None = None
    user: str | None = None


class CompletionRequest(GenerateRequest):
    """`POST /v1/completions`."""

    prompt: SkipValidation[Prompt]
    echo: bool | None = Field(None, description="the prompt before its answer; not with logprobs")
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128, description="taken where it is n")


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"] = "text"
    text: str


class Message(BaseModel):
    """One message. Its other fields are passed on to the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: SkipValidation[str | list[TextPart] | None] = None


class _Conversation(_Body):
    messages: Annotated[list[Message], _FirstOnly()] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerateRequest, _Conversation):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class _Tokenize(_Body):
    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeRequest(_Tokenize):
    """`POST /tokenize`, of a plain prompt."""

    prompt: str
    add_special_tokens: bool = True


class TokenizeChatRequest(_Tokenize, _Conversation):
    """`POST /tokenize`, of a conversation; its template writes the special tokens."""


class DetokenizeRequest(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
