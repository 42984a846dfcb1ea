"""What a host hit is worth: restoring a prefix against computing it again (paper, Eq. 2, 3 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

# A multiplication and an addition for each parameter that a token activates.
_FLOP_PER_PARAMETER = 2.0


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """The two costs at one operating point of one deployment.

    Attributes:
        bytes_per_token: beta per rank.
        prefill_s_per_token: t_pf, effective prefill time of the whole engine.
        restore_bytes_per_s: B_H2D, effective host-to-GPU bandwidth per rank; ranks restore their shards side by side.
        load_overhead_s: tau_load, of one restoration.
    """

    bytes_per_token: int
    prefill_s_per_token: float
    restore_bytes_per_s: float
    load_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name, valid in (
            ("bytes_per_token", self.bytes_per_token >= 0),
            ("prefill_s_per_token", self.prefill_s_per_token > 0),
            ("restore_bytes_per_s", self.restore_bytes_per_s > 0),
            ("load_overhead_s", self.load_overhead_s >= 0),
        ):
            if not valid:
                raise ValueError(f"OffloadCost.{name} is out of range: {getattr(self, name)}")

    @property
    def restore_s_per_token(self) -> float:
        """beta / B_H2D, without the overhead."""
        return self.bytes_per_token / self.restore_bytes_per_s

    def load_s(self, tokens: float) -> float:
        """Eq. 2: T_load of a prefix of so many tokens."""
        return tokens * self.restore_s_per_token + self.load_overhead_s

    def load_s_per_token(self, tokens: float) -> float:
        """Eq. 7: t_load, T_load over the prefix's tokens, > 0; the overhead fades as they grow."""
        if not tokens > 0:
            raise ValueError(f"tokens is {tokens}; it must be positive")
        return self.load_s(tokens) / tokens

    def benefit_ratio(self, tokens: float | None = None) -> float:
        """Eq. 2: OBR, the share of recomputation time that restoring saves; below zero where restoring costs more.

        Args:
            tokens: length of the prefix, > 0; the limit of long ones if None.
        """
        load_s_per_token = self.restore_s_per_token if tokens is None else self.load_s_per_token(tokens)
        return 1.0 - load_s_per_token / self.prefill_s_per_token

    def serving_balance_s(
        self, computed_without_tokens: float, computed_with_tokens: float, restored_tokens: float, other_s: float = 0.0
    ) -> float:
        """Eq. 3: change of serving cost that a host tier brings; negative where it pays.

        Args:
            computed_without_tokens, computed_with_tokens: U_0 and U_1, computed prefill without and with the tier.
            restored_tokens: R, restored per rank beyond what the GPU held.
            other_s: writes, set-up and exposed delays.
        """
        saved_s = (computed_without_tokens - computed_with_tokens) * self.prefill_s_per_token
        return -saved_s + restored_tokens * self.restore_s_per_token + other_s


def least_prefill_s_per_token(activated_parameters: float, ranks: int, peak_flop_per_s: float) -> float:
    """Seconds that one prompt token takes at least: 2 FLOP per activated parameter at the ranks' summed peak.

    Attention and imperfect parallelism only add to it, so an OBR computed from it is a lower bound (Appendix C).
    """
    if activated_parameters <= 0 or ranks < 1 or peak_flop_per_s <= 0:
        raise ValueError(
            f"activated_parameters={activated_parameters} must be > 0, ranks={ranks} >= 1, "
            f"peak_flop_per_s={peak_flop_per_s} > 0"
        )
    return _FLOP_PER_PARAMETER * activated_parameters / (ranks * peak_flop_per_s)
