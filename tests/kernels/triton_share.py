"""Which tests of the Triton kernels run when: Triton's interpreter takes a hundred times as long as a native kernel.

Quick are those that meet each kernel, each storage format and each kind of fault once. All others carry the mark
`full`, except that of the cross products, an hour in the interpreter, only every so many cases are kept, first for one
activation dtype and then for the other. A test of the Triton kernels is one whose id has the word `triton`.
"""

from __future__ import annotations

import re

QUICK = re.compile(
    "|".join(
        (
            r"test_attention\[triton-(decode-int8-rotated|mixed-bf16|fp8-e4m3|window-holes|sinks|key-bias-partial-rotary)\]",
            r"test_attention\[triton-bf16-(gqa-1|head-80|shared|empty)\]",
            r"test_rope_and_write\[triton-(mixed-int8-rotated|fp8-e5m2|gqa-3|head-96|key-bias-partial-rotary)\]",
            r"test_rope_and_write\[triton-bf16-(decode-bf16|head-256)\]",
            r"test_copy_block_\w+\[triton-decode-int8-(0|7|16)\]",
            r"test_attention\.py::test_a_\w+\[triton\]",
            r"test_matches_the_dequantised_matrix\[triton-(int4-g32|int4-g128|int4-row|int8-g33-odd|mixed)-(0|1|17)\]",
            r"test_matches_the_dequantised_matrix\[triton-bf16-(int4-g64|int8-row|bf16)-(2|33)\]",
            r"test_(embedding_rows|prepared_bytes_are_what_prepare_holds|gather_takes_live_logit_rows)\[triton-",
            r"test_residual_may_be_the_output\[triton",
            r"test_faulty_attention_is_found\[triton-(drop_after_first_split|ignore_table_order|ignore_scale)-",
            r"test_faulty_writing_is_found\[triton-(?!bf16)",
            r"test_faulty_(weights_are|rows_are)_found\[triton-(?!bf16)",
            r"test_(rms_norm|silu_mul)\[triton-\d+-(1|7|33)\]",
            r"test_(rms_norm|silu_mul)\[triton-bf16-\d+-2\]",
            r"test_sampling\.py::test_(greedy|order_of|no_rows|a_row_that_is|a_mask)",
            r"test_triton_(aot|device|start|sampling)\.py::",
            r"test_triton_linear\.py::(?!test_triton_(splits_of_the_input|weights_written_out|every_code))",
            r"test_triton_rows\.py::(?!test_stored_bytes)",
            r"test_triton_launches\.py::test_triton_launches_of_attention",
            r"test_triton_bench\.py::(?!test_triton_kernels_pass)",
            r"test_triton_program\.py::(?!test_(steps_copies|a_planted_fault|a_wait_that|all_waits))",
            r"test_triton_attention\.py::(?!test_(few_query|sizes_that)).*\[triton(?!-bf16)",
        )
    )
)
CROSS_PRODUCT = "cross_product["
KEPT_OF_CROSS_PRODUCT = 29
"""Every 29th case: a prime, so that no column of the product is met with one value only."""


def is_triton(node_id: str) -> bool:
    return "triton" in node_id


def is_quick(node_id: str) -> bool:
    return QUICK.search(node_id) is not None


def is_cross_product(node_id: str) -> bool:
    return CROSS_PRODUCT in node_id
