"""The oracle: transformers' models with the same weights, greedy, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR_TIE = 1e-4  # the order of two best logits this close is left open


def hf_tiny() -> PreTrainedModel:
    """Return Return transformers' model with the weights of `tiny`."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

    from engine.models.loading.tiny import open_tiny

    checkpoint = open_tiny()
    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    state = {name: checkpoint.read(name) for name in checkpoint.shapes}
    model.load_state_dict(state, strict=True)
    return model


class Reference:
    """Generates greedily, and compares tokens. Only near ties are excused, and counted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.excused = 0

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new: int) -> list[int]:
        """Generate `new` tokens after `prompt`, beyond EOS."""
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def check(self, prompt: list[int], got: list[int], wanted: list[int], what: str = "") -> None:
        """Assert that `got` is `wanted`, or first differs where the two best logits nearly tie."""
        if got == wanted:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        logits = self._model(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
        best = logits.topk(2).values
        gap = float(best[0] - best[1])
        assert gap < NEAR_TIE, f"{what}: token {at} differs with a gap of {gap}: {got} {wanted}"
        self.excused += 1
        print(f"excused: {what} token {at}, gap {gap:.2e}")
