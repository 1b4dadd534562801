"""Test helpers, public because whoever builds on the cache needs them too: cases, an oracle, tolerances.

`make_case` draws one ragged batch whose mistakes show: page ids are a permutation, K and V are independent in every
sequence and layer, and every slot that no live token owns holds NaN. `oracle` answers in float64 from the dense K and V
that the case was cut from, so it shares no line with the code under test: no page, no tile, no running maximum.
"""

from jaxpaged.testing.cases import Case, make_case
from jaxpaged.testing.oracle import TOLERANCE, assert_attention_close, oracle

__all__ = ["TOLERANCE", "Case", "assert_attention_close", "make_case", "oracle"]
