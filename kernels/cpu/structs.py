"""The structs of src/abi.h, field by field. Pointers are plain addresses: whoever fills one keeps the buffer alive."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

ABI_VERSION = 4


class Kernel(IntEnum):
    """KvdKernel."""

    EMBED = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    SILU_MUL = 4
    ROPE_WRITE = 5
    ATTEND = 6
    GATHER = 7
    SAMPLE = 8
    READ_BYTES = 9
    DOT_PEAK = 10


class Type(IntEnum):
    """KvdType."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3
    U4 = 4


class GroupTablesStruct(ctypes.Structure):
    _fields_ = [
        ("block_tables", c_void_p),
        ("first_positions", c_void_p),
        ("num_slots", c_void_p),
        ("write_slots", c_void_p),
        ("table_stride", c_int64),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("logit_rows", c_void_p),
        ("groups", c_void_p),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_logit_rows", c_int32),
        ("num_groups", c_int32),
    ]


class StageStruct(ctypes.Structure):
    _fields_ = [("kernel", c_int32), ("reserved", c_int32), ("args", c_void_p)]


class EmbedArgs(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("group", c_int64),
        ("vocab", c_int64),
        ("type", c_int32),
    ]


class NormArgs(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
    ]


class Quantized(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("stride", c_int64),
        ("groups", c_int64),
        ("weight_group", c_int64),
        ("cuts", c_int64),
        ("length", c_int64),
    ]


class QuantizeArgs(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("norm_weight", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
        ("out", Quantized),
    ]


class Part(ctypes.Structure):
    _fields_ = [
        ("type", c_int32),
        ("quantized", c_int32),
        ("packed", c_void_p),
        ("num_outputs", c_int64),
        ("first_output", c_int64),
    ]


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("inputs", c_void_p),
        ("parts", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("num_parts", c_int64),
        ("gated", c_int32),
    ]


class SiluArgs(ctypes.Structure):
    _fields_ = [("rows", c_int64), ("gate_up", c_void_p), ("out", c_void_p), ("width", c_int64)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("v_offset", c_int64),
        ("k_scale_offset", c_int64),
        ("v_scale_offset", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotation_size", c_int64),
        ("k_type", c_int32),
        ("v_type", c_int32),
        ("group_id", c_int32),
        ("window", c_int32),
    ]


class RopeArgs(ctypes.Structure):
    _fields_ = [
        ("layer", c_void_p),
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_out", c_void_p),
        ("num_heads", c_int64),
        ("half", c_int64),
    ]


class AttendArgs(ctypes.Structure):
    _fields_ = [
        ("layer", c_void_p),
        ("q", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("key_bias", c_void_p),
        ("out", c_void_p),
        ("block_mass", c_void_p),
        ("partials", c_void_p),
        ("partial_capacity", c_int64),
        ("mass_stride", c_int64),
        ("num_heads", c_int64),
        ("half", c_int64),
        ("max_positions", c_int64),
        ("scale", c_float),
    ]


class GatherArgs(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("out", c_void_p), ("width", c_int64)]


class Ragged(ctypes.Structure):
    _fields_ = [("ids", c_void_p), ("values", c_void_p), ("counts", c_void_p)]


class SampleArgs(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("repetition", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("num_logprobs", c_void_p),
        ("prompt", Ragged),
        ("output", Ragged),
        ("bias", Ragged),
        ("banned", Ragged),
        ("masks", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("top_stride", c_int64),
    ]


class MeasureArgs(ctypes.Structure):
    _fields_ = [("bytes", c_void_p), ("count", c_int64), ("sink", c_void_p)]
