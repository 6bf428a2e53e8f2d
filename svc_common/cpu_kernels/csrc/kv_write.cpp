#include "kv_write.h"

#include <algorithm>
#include <string>

namespace neoflex {

namespace {

// Tokens one thread takes at a time; fewer than two such portions are written sooner than a helper wakes.
constexpr std::int32_t portion_tokens = 32;

}  // namespace

void check_places(const KvTokens& tokens, std::int32_t num_blocks, std::int32_t block_tokens) {
    for (std::int32_t i = 0; i < tokens.num_tokens; ++i) {
        if (tokens.blocks[i] < 0 || tokens.blocks[i] >= num_blocks)
            throw PlaneError("token " + std::to_string(i) + ": block " + std::to_string(tokens.blocks[i]) + " of " +
                             std::to_string(num_blocks));
        if (tokens.offsets[i] < 0 || tokens.offsets[i] >= block_tokens)
            throw PlaneError("token " + std::to_string(i) + ": offset " + std::to_string(tokens.offsets[i]) +
                             " in a block of " + std::to_string(block_tokens));
    }
}

void write_kv(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads,
              const KvTokens& tokens, std::byte* pool_layer) {
    const std::size_t exchange_bytes = dtype_bytes(shape.exchange_dtype);
    const std::size_t row_bytes = shape.head_dim * exchange_bytes;
    const std::size_t head_bytes =
        static_cast<std::size_t>(shape.block_tokens) * shape.head_dim * dtype_bytes(shape.kv_dtype);
    const std::int32_t num_portions = (tokens.num_tokens + portion_tokens - 1) / portion_tokens;
    threads.run(static_cast<std::uint32_t>(num_portions), num_portions > 1, [&](std::uint32_t portion, int) {
        const std::int32_t begin = static_cast<std::int32_t>(portion) * portion_tokens;
        const std::int32_t end = std::min(begin + portion_tokens, tokens.num_tokens);
        for (std::int32_t i = begin; i < end; ++i) {
            const std::byte* k = tokens.kv + i * tokens.stride * exchange_bytes;
            const std::byte* v = k + heads.num_kv_heads * row_bytes;
            for (std::int32_t h = 0; h < heads.num_kv_heads; ++h)
                kernel.write(shape, pool_layer + h * head_bytes, tokens.blocks[i], tokens.offsets[i], k + h * row_bytes,
                             v + h * row_bytes);
        }
    });
}

}  // namespace neoflex
