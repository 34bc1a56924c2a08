"""Sampling parameters of calls as vLLM's."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from engine.protocol import BadRequest, StartGenerate, Structure, Unsupported

__all__ = ["generation_params", "send_params"]

MOST_TOP_K = 2**31 - 1  # more than any vocabulary; vLLM keeps it in 32 bits
MIX = 0x9E3779B97F4A7C15  # odd: distinct seeds for the choices of a request


def generation_params(call: StartGenerate, start: int | None) -> SamplingParams:
    """Return the parameters of a generation; `start` numbers the lease that it goes on from.

    Stop strings are looked for in the lead. Of `output`, which vLLM takes for a part of the prompt,
    the limits of length know; penalties and random numbers do not continue exactly. Raises
    `Unsupported` for an output with a structure that has begun elsewhere, and `BadRequest` for
    values that vLLM does not take.
    """
    done = len(call.output)
    if call.structure is not None and done:
        raise Unsupported(
            "a vLLM engine cannot continue a structured output", param=call.structure.param
        )
    try:
        return _params(call, start)
    except (VLLMClientError, ValueError, OverflowError) as error:
        raise BadRequest(f"vLLM refuses the request: {error}") from None


def _params(call: StartGenerate, start: int | None) -> SamplingParams:
    done = len(call.output)
    return SamplingParams(
        max_tokens=call.max_tokens - done,
        min_tokens=max(call.min_tokens - done, 0),
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=min(call.top_k, MOST_TOP_K),
        min_p=call.min_p,
        seed=_seed(call) if call.temperature else None,
        stop_token_ids=call.stop_token_ids,
        # Only the end of the text is allowed behind a complete structure.
        ignore_eos=call.ignore_eos and call.structure is None,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        repetition_penalty=call.repetition_penalty,
        logit_bias=dict(call.logit_bias) or None,
        logprobs=call.logprobs,
        structured_outputs=None if call.structure is None else _structure(call.structure),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if start is None else _extra(start=start),
    )


def send_params(request_id: str) -> SamplingParams:
    """Return the parameters of the request that computes a send's KV; its token is dropped."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=_extra(send=request_id),
    )


def _extra(**params: object) -> dict[str, Any]:
    return {"kv_transfer_params": params}


def _seed(call: StartGenerate) -> int:
    """Return a seed of the choice and of the position, as vLLM takes it: 63 bits."""
    return (call.seed + MIX * call.choice + MIX * MIX * len(call.output)) & (2**63 - 1)


def _structure(structure: Structure) -> StructuredOutputsParams:
    match structure.kind:
        case "json_schema":
            return StructuredOutputsParams(json=structure.source)
        case "regex":
            return StructuredOutputsParams(regex=structure.source)
        case "ebnf" | "lark":
            return StructuredOutputsParams(grammar=structure.source)
