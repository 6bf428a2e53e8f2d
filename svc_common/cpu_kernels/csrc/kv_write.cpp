#include "kv_write.h"

#include <algorithm>
#include <string>
#include <vector>

namespace neoflex {

namespace {

// Tokens one thread takes at a time; fewer than two such portions are written sooner than a helper wakes.
constexpr std::int32_t portion_tokens = 32;

void require_place(bool holds, std::int32_t token, const std::string& what) {
    if (!holds) throw PlaneError("token " + std::to_string(token) + ": " + what);
}

bool goes_on(const KvTokens& tokens, std::int32_t i) {
    return tokens.blocks[i] == tokens.blocks[i - 1] && tokens.offsets[i] == tokens.offsets[i - 1] + 1;
}

// The end of the tokens from `begin` on that lie one after the other in one block.
std::int32_t run_end(const KvTokens& tokens, std::int32_t begin) {
    std::int32_t end = begin + 1;
    while (end < tokens.num_tokens && goes_on(tokens, end)) ++end;
    return end;
}

void check_runs(const KvTokens& tokens) {
    std::vector<std::int32_t> blocks;
    for (std::int32_t i = 0; i < tokens.num_tokens; i = run_end(tokens, i)) blocks.push_back(tokens.blocks[i]);
    std::sort(blocks.begin(), blocks.end());
    const auto twice = std::adjacent_find(blocks.begin(), blocks.end());
    if (twice != blocks.end())
        throw PlaneError("tokens of block " + std::to_string(*twice) + " do not follow one another");
}

std::size_t layer_bytes(const KernelShape& shape, std::int32_t num_blocks) {
    return num_blocks * shape.block_stride * dtype_bytes(shape.kv_dtype);
}

Blocks layer_of(const Blocks& cache, const KernelShape& shape, std::int32_t num_blocks, std::int32_t layer) {
    float* scales = cache.scales;
    if (scales != nullptr) scales += layer * num_blocks * shape.scale_stride;
    return {cache.pool + layer * layer_bytes(shape, num_blocks), scales};
}

void check_copy(const BlockCopy& copy) {
    for (std::int32_t i = 0; i < copy.num_blocks; ++i) {
        const bool exist = copy.from_blocks[i] >= 0 && copy.from_blocks[i] < copy.from_num_blocks &&
                           copy.to_blocks[i] >= 0 && copy.to_blocks[i] < copy.to_num_blocks;
        if (!exist || copy.num_tokens[i] < 1 || copy.num_tokens[i] > copy.from_shape.block_tokens)
            throw PlaneError("copy of " + std::to_string(copy.num_tokens[i]) + " tokens of block " +
                             std::to_string(copy.from_blocks[i]) + " of " + std::to_string(copy.from_num_blocks) +
                             " to block " + std::to_string(copy.to_blocks[i]) + " of " +
                             std::to_string(copy.to_num_blocks));
    }
}

}  // namespace

void check_places(const KvTokens& tokens, const KernelShape& shape, std::int32_t num_blocks) {
    for (std::int32_t i = 0; i < tokens.num_tokens; ++i) {
        require_place(tokens.blocks[i] >= 0 && tokens.blocks[i] < num_blocks, i,
                      "block " + std::to_string(tokens.blocks[i]) + " of " + std::to_string(num_blocks));
        require_place(tokens.offsets[i] >= 0 && tokens.offsets[i] < shape.block_tokens, i,
                      "offset " + std::to_string(tokens.offsets[i]) + " in a block of " +
                          std::to_string(shape.block_tokens));
    }
    if (shape.kv_dtype == DType::int8) check_runs(tokens);
}

void write_kv(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape, ThreadPool& threads,
              const KvTokens& tokens, const Blocks& layer) {
    // Whole runs, so that a block has one writer.
    std::vector<std::int32_t> begins;
    for (std::int32_t i = 0; i < tokens.num_tokens; i = run_end(tokens, i))
        if (begins.empty() || i - begins.back() >= portion_tokens) begins.push_back(i);
    begins.push_back(tokens.num_tokens);
    const std::size_t exchange_bytes = dtype_bytes(shape.exchange_dtype);
    const std::size_t row_bytes = shape.head_dim * exchange_bytes;
    const auto num_portions = static_cast<std::uint32_t>(begins.size() - 1);
    threads.run(num_portions, num_portions > 1, [&](std::uint32_t portion, int) {
        for (std::int32_t i = begins[portion]; i < begins[portion + 1];) {
            const std::int32_t end = run_end(tokens, i);
            const std::byte* k = tokens.kv + i * tokens.stride * exchange_bytes;
            const std::byte* v = k + heads.num_kv_heads * row_bytes;
            for (std::int32_t h = 0; h < heads.num_kv_heads; ++h)
                kernel.write(shape, head_kv(shape, layer.pool, layer.scales, h, nullptr),
                             {tokens.blocks[i], tokens.offsets[i], end - i, k + h * row_bytes, v + h * row_bytes,
                              tokens.stride});
            i = end;
        }
    });
}

void copy_blocks(const Kernel& kernel, const HeadCounts& heads, ThreadPool& threads, const BlockCopy& copy,
                 const Blocks& from, const Blocks& to) {
    check_copy(copy);
    const std::size_t half = head_block_elements(copy.from_shape);
    std::vector<float> rows(threads.resize() * 2 * half);
    const auto num_tasks = static_cast<std::uint32_t>(copy.num_layers * copy.num_blocks);
    threads.run(num_tasks, num_tasks > 1, [&](std::uint32_t task, int thread) {
        const auto layer = static_cast<std::int32_t>(task) / copy.num_blocks;
        const auto i = static_cast<std::int32_t>(task) % copy.num_blocks;
        const Blocks source = layer_of(from, copy.from_shape, copy.from_num_blocks, layer);
        const Blocks target = layer_of(to, copy.to_shape, copy.to_num_blocks, layer);
        float* k = rows.data() + thread * 2 * half;
        float* v = k + half;
        for (std::int32_t h = 0; h < heads.num_kv_heads; ++h) {
            kernel.read_tokens(copy.from_shape, head_kv(copy.from_shape, source.pool, source.scales, h, nullptr),
                        copy.from_blocks[i], copy.num_tokens[i], k, v);
            kernel.write(copy.to_shape, head_kv(copy.to_shape, target.pool, target.scales, h, nullptr),
                         {copy.to_blocks[i], 0, copy.num_tokens[i], k, v,
                          static_cast<std::size_t>(copy.from_shape.head_dim)});
        }
    });
}

}  // namespace neoflex
