"""The shape of a model: frozen, hashable, plain Python."""

import dataclasses

from jaxpaged.config import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama-family decoder, as the checkpoint states it.

    Attributes:
        rope_theta: Base of the rotary frequencies.
        rope_factor: Linear rotary scaling: positions are divided by it.
        rope_freq_factors: Divisor of each of the head_dim / 2 rotary frequencies (Llama 3.1 long context), or None.
        max_position: Context length the model was trained for, in tokens.
        sliding_windows: Of each layer, how many tokens a token sees, itself included, or None for all before it. None
            in place of the tuple is all, in all layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_freq_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = True
    sliding_windows: tuple[int | None, ...] | None = None

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in a cache."""
        windows = self.sliding_windows or (None,) * self.num_layers
        return tuple(
            LayerSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, sliding_window=window)
            for window in windows
        )
