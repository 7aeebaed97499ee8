// Weights in the order that kernels read them (tiles.h draws it); the same at every level.
#pragma once
#include <stdint.h>
#include <string.h>

#include "abi.h"
#include "level.h"

namespace kvd {
#include "tiles.h"

struct PackLayout {
    int64_t weight_group, cuts, length, groups;

    // group 0 (as float parts have it) stands for the whole row.
    PackLayout(int64_t num_inputs, int64_t group) {
        weight_group = group > 0 ? group : num_inputs;
        length = weight_group < ACTIVATION_GROUP ? weight_group : ACTIVATION_GROUP;
        cuts = divide_up(weight_group, length);
        groups = num_inputs / weight_group * cuts;
    }

    // Where channel c is: its activation group and its place in there.
    void locate(int64_t c, int64_t *group, int64_t *at) const {
        const int64_t in_group = c % weight_group;
        *group = c / weight_group * cuts + in_group / length;
        *at = in_group % length;
    }
};

inline int64_t tile_bytes(int32_t type, int64_t num_inputs, int64_t group) {
    const PackLayout layout(num_inputs, group);
    if (type == KVD_U4) return u4_tile_bytes(layout.groups, layout.length);
    if (type == KVD_I8) return i8_tile_bytes(layout.groups, layout.length);
    return float_tile_bytes(num_inputs, type == KVD_F32 ? 4 : 2);
}

inline bool can_pack(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group) {
    if (type < KVD_F32 || type > KVD_U4 || num_outputs < 0 || num_inputs < 1 || num_inputs > MAX_INPUTS) return false;
    if (type == KVD_U4 && num_inputs % 2) return false;
    return group <= 0 || num_inputs % group == 0;
}

// -1: no such matrix can be packed.
inline int64_t packed_bytes(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group) {
    if (!can_pack(type, num_outputs, num_inputs, group)) return -1;
    return divide_up(num_outputs, TILE) * tile_bytes(type, num_inputs, group);
}

inline void pack_u4_row(
    const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets, int64_t num_inputs, const PackLayout &layout,
    int64_t lane, uint8_t *tile) {
    const int64_t group_bytes = u4_group_bytes(layout.length);
    const bool in_lines = layout.weight_group % 8 == 0;  // eight channels of a line are four bytes of the source
    for (int64_t c = 0; in_lines && c < num_inputs; c += 8) {
        int64_t group, at;
        layout.locate(c, &group, &at);
        const uint8_t *pairs = codes + c / 2;
        uint8_t *bytes = tile + group * group_bytes + at / 8 * LINE + lane * 4;
        bytes[0] = uint8_t((pairs[0] & 15) | (pairs[2] << 4));
        bytes[1] = uint8_t((pairs[0] >> 4) | (pairs[2] & 0xf0));
        bytes[2] = uint8_t((pairs[1] & 15) | (pairs[3] << 4));
        bytes[3] = uint8_t((pairs[1] >> 4) | (pairs[3] & 0xf0));
    }
    for (int64_t c = 0; !in_lines && c < num_inputs; ++c) {
        int64_t group, at;
        layout.locate(c, &group, &at);
        const int code = c % 2 ? codes[c / 2] >> 4 : codes[c / 2] & 15;
        uint8_t &byte = tile[group * group_bytes + at / 8 * LINE + lane * 4 + at % 4];
        byte = at % 8 < 4 ? uint8_t((byte & 0xf0) | code) : uint8_t((byte & 0x0f) | (code << 4));
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
        uint8_t *line = tile + (group + 1) * group_bytes - LINE;
        memcpy(line + lane * 2, scales + group / layout.cuts, 2);
        memcpy(line + LINE / 2 + lane * 2, offsets + group / layout.cuts, 2);
    }
}

inline void pack_i8_row(
    const int8_t *codes, const uint16_t *scales, int64_t num_inputs, const PackLayout &layout, int64_t lane,
    uint8_t *tile) {
    const int64_t lines = i8_lines(layout.length);
    const int64_t step = layout.weight_group % 4 == 0 ? 4 : 1;
    for (int64_t c = 0; c < num_inputs; c += step) {
        int64_t group, at;
        layout.locate(c, &group, &at);
        memcpy(tile + (group * lines + at / 4) * LINE + lane * 4 + at % 4, codes + c, size_t(step));
    }
    uint8_t *behind = tile + i8_scales_at(layout.groups, layout.length);
    for (int64_t group = 0; group < layout.groups; ++group)
        memcpy(behind + (group * TILE + lane) * 2, scales + group / layout.cuts, 2);
}

inline uint32_t magnitude_bits(int32_t type, const uint8_t *value) {
    if (type == KVD_F32) {
        uint32_t word;
        memcpy(&word, value, 4);
        return word & 0x7fffffff;
    }
    uint16_t half;
    memcpy(&half, value, 2);
    half &= 0x7fff;
    if (type == KVD_BF16) return uint32_t(half) << 16;
    if (half >= 0x7c00) return 0x7f800000u | (uint32_t(half & 0x3ff) << 13);
    if (half >= 0x400) return (uint32_t(half) << 13) + (112u << 23);
    const float subnormal = float(half) * 5.9604644775390625e-8f;  // 2^-24
    uint32_t word;
    memcpy(&word, &subnormal, 4);
    return word;
}

inline void pack_float_row(int32_t type, const uint8_t *values, int64_t num_inputs, int64_t lane, uint8_t *tile) {
    const int64_t size = type == KVD_F32 ? 4 : 2;
    int activation_bits, weight_bits;
    exact_bits(num_inputs, &activation_bits, &weight_bits);
    uint32_t largest = 0;  // magnitudes compare like their bits, NaN above all
    for (int64_t c = 0; c < num_inputs; ++c) {
        const uint32_t magnitude = magnitude_bits(type, values + c * size);
        largest = magnitude > largest ? magnitude : largest;
        memcpy(tile + FLOAT_HEAD_BYTES + (c * TILE + lane) * size, values + c * size, size_t(size));
    }
    const uint32_t scale = fixed_point_scale_bits(largest, weight_bits), reciprocal = reciprocal_bits(scale);
    memcpy(tile + lane * 4, &scale, 4);
    memcpy(tile + TILE * 4 + lane * 4, &reciprocal, 4);
}

// Writes outputs first … first + count - 1 alone; the part's first call clears the bytes of the filled-up lanes, so
// it comes before the others. 0, or -1 where the form cannot be packed.
inline int32_t pack_part(
    int32_t type, const void *codes, const uint16_t *scales, const uint16_t *offsets, int64_t first, int64_t count,
    int64_t num_outputs, int64_t num_inputs, int64_t group, uint8_t *packed) {
    if (!can_pack(type, num_outputs, num_inputs, group)) return -1;
    if (first < 0 || count < 0 || first + count > num_outputs) return -1;
    const PackLayout layout(num_inputs, group);
    const int64_t bytes = tile_bytes(type, num_inputs, group);
    const int64_t scales_per_row = num_inputs / layout.weight_group;
    if (first == 0) memset(packed, 0, size_t(divide_up(num_outputs, TILE) * bytes));
    const uint8_t *source = static_cast<const uint8_t *>(codes);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t output = first + row, lane = output % TILE;
        uint8_t *tile = packed + output / TILE * bytes;
        if (type == KVD_U4)
            pack_u4_row(
                source + row * num_inputs / 2, scales + row * scales_per_row, offsets + row * scales_per_row,
                num_inputs, layout, lane, tile);
        else if (type == KVD_I8)
            pack_i8_row(
                reinterpret_cast<const int8_t *>(source) + row * num_inputs, scales + row * scales_per_row, num_inputs,
                layout, lane, tile);
        else
            pack_float_row(type, source + row * num_inputs * (type == KVD_F32 ? 4 : 2), num_inputs, lane, tile);
    }
    return 0;
}

}  // namespace kvd
