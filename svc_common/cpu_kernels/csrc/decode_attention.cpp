#include "decode_attention.h"

#include <algorithm>
#include <string>

namespace neoflex {

namespace {

// Several pieces per thread even out their lengths and the threads' speeds.
constexpr std::int64_t pieces_per_thread = 4;
// Shorter spans cost more in merging than they gain.
constexpr std::int64_t min_span_tokens = 128;
// What a piece's heads have of a block should lie in one piece of at least this size: the processor reads ahead beyond
// what is asked for, and pages and rows of memory are opened less often.
constexpr std::size_t run_bytes = 32 * 1024;
// KV that one core reads in about the time that waking another takes.
constexpr std::size_t min_bytes_per_thread = 64 * 1024;

void require(bool holds, const std::string& what) {
    if (!holds) throw PlaneError(what);
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

void check_decodes(const DecodeBatch& batch, const Shape& shape, std::int32_t num_blocks) {
    require(batch.num_sequences >= 1 && batch.num_sequences <= shape.max_sequences,
            std::to_string(batch.num_sequences) + " sequences in a sub-batch, allowed are 1 to " +
                std::to_string(shape.max_sequences));
    for (std::int32_t s = 0; s < batch.num_sequences; ++s) {
        const std::int32_t context = batch.context_tokens[s];
        const std::int32_t needed = context < 1 ? 0 : (context - 1) / shape.block_tokens + 1;
        // A table may name a block twice: measurements of long contexts need no pool as large.
        require(needed >= 1 && needed <= batch.stride,
                "sequence " + std::to_string(s) + ": context of " + std::to_string(context) +
                    " tokens beside a table of " + std::to_string(batch.stride) + " blocks");
        const std::int32_t* blocks = batch.block_tables + static_cast<std::size_t>(s) * batch.stride;
        for (std::int32_t b = 0; b < needed; ++b)
            require(blocks[b] >= 0 && blocks[b] < num_blocks,
                    "sequence " + std::to_string(s) + ": block " + std::to_string(blocks[b]) + " of " +
                        std::to_string(num_blocks));
    }
}

KernelShape make_kernel_shape(const HeadCounts& heads, std::int32_t head_dim, std::int32_t block_tokens,
                              DType kv_dtype, DType exchange_dtype, float softmax_scale, float softcap) {
    const std::size_t half_block = static_cast<std::size_t>(heads.num_kv_heads) * block_tokens * head_dim;
    return {heads.num_q_heads / heads.num_kv_heads,
            head_dim,
            block_tokens,
            kv_dtype,
            exchange_dtype,
            2 * half_block,
            half_block,
            2 * static_cast<std::size_t>(heads.num_kv_heads),
            softmax_scale,
            softcap};
}

HeadKv head_kv(const KernelShape& shape, std::byte* pool, float* scales, std::size_t head,
               const std::int32_t* block_table) {
    return {pool + head * head_block_elements(shape) * dtype_bytes(shape.kv_dtype),
            scales == nullptr ? nullptr : scales + head, block_table};
}

const Kernel& fitting_kernel(const Kernel& kernel, const KernelShape& shape) {
    return shape.value_offset < 2 * max_lanes ? scalar_kernel : kernel;
}

DecodePlan::DecodePlan(const DecodeBatch& batch, const HeadCounts& heads, const KernelShape& shape,
                       std::int32_t sliding_window, int num_threads)
    : batch_(batch) {
    auto first_token = [&](std::int32_t sequence) {
        const std::int32_t context = batch.context_tokens[sequence];
        return sliding_window > 0 ? std::max(0, context - sliding_window) : 0;
    };
    std::int64_t head_tokens = 0;  // over sequences and KV heads
    for (std::int32_t s = 0; s < batch.num_sequences; ++s)
        head_tokens += std::int64_t{batch.context_tokens[s] - first_token(s)} * heads.num_kv_heads;
    const std::size_t bytes = 2 * head_tokens * shape.head_dim * dtype_bytes(shape.kv_dtype);
    worth_helpers_ = num_threads > 1 && bytes >= 2 * min_bytes_per_thread;
    const std::int64_t span_limit =
        worth_helpers_ ? std::max(min_span_tokens, divide_up(head_tokens, num_threads * pieces_per_thread))
                       : std::max<std::int64_t>(head_tokens, 1);
    const auto heads_wanted = static_cast<std::int32_t>(
        divide_up(run_bytes, static_cast<std::int64_t>(head_block_elements(shape) * dtype_bytes(shape.kv_dtype))));
    const auto num_tiles = static_cast<std::int32_t>(divide_up(heads.num_kv_heads, heads_wanted));
    const auto most_heads = divide_up(heads.num_kv_heads, num_tiles);
    for (std::int32_t s = 0; s < batch.num_sequences; ++s) {
        const std::int32_t begin = first_token(s);
        const std::int32_t end = batch.context_tokens[s];
        const std::int64_t wanted_spans = divide_up((end - begin) * most_heads, span_limit);
        // Whole blocks: the last span's thread may change all of the block to which it appends.
        const std::int32_t first_block = begin / shape.block_tokens;
        const std::int32_t num_blocks = (end - 1) / shape.block_tokens + 1 - first_block;
        const auto span_blocks = static_cast<std::int32_t>(divide_up(num_blocks, wanted_spans));
        const auto num_spans = static_cast<std::int32_t>(divide_up(num_blocks, span_blocks));
        const auto cut_at = [&](std::int32_t span) {
            const std::int64_t token = (first_block + std::int64_t{span} * span_blocks) * shape.block_tokens;
            return static_cast<std::int32_t>(std::clamp<std::int64_t>(token, begin, end));
        };
        for (std::int32_t tile = 0; tile < num_tiles; ++tile) {
            const std::int32_t first_head = tile * heads.num_kv_heads / num_tiles;
            const std::int32_t num_heads = (tile + 1) * heads.num_kv_heads / num_tiles - first_head;
            const std::int32_t cut = num_spans > 1 ? num_cuts_++ : -1;
            for (std::int32_t i = 0; i < num_spans; ++i)
                pieces_.push_back(
                    {s, first_head, num_heads, cut_at(i), cut_at(i + 1), cut, i, num_spans, num_partials_});
            if (num_spans > 1) num_partials_ += num_spans * num_heads;
        }
    }
    spans_left_ = std::make_unique<std::atomic<std::int32_t>[]>(num_cuts_);
    for (const Piece& piece : pieces_)
        if (piece.cut >= 0) spans_left_[piece.cut].store(piece.num_spans, std::memory_order_relaxed);
    partials_ = std::make_unique<float[]>(num_partials_ * partial_floats(shape));
}

DecodeAttention::DecodeAttention(const Kernel& kernel, const HeadCounts& heads, const KernelShape& shape,
                                 ThreadPool& threads)
    : kernel_(fitting_kernel(kernel, shape)), heads_(heads), shape_(shape), threads_(threads) {}

void DecodeAttention::make_room() {
    while (scratch_.size() < static_cast<std::size_t>(threads_.num_running()))
        scratch_.push_back(std::make_unique<float[]>(heads_.num_kv_heads * scratch_floats(shape_)));
}

void DecodeAttention::run(DecodePlan& plan, const LayerTensors& layer) {
    make_room();
    threads_.run(static_cast<std::uint32_t>(plan.pieces_.size()), plan.worth_helpers_,
                 [&](std::uint32_t piece, int thread) {
                     run_piece(plan, plan.pieces_[piece], layer, scratch_[thread].get());
                 });
}

void DecodeAttention::run_piece(DecodePlan& plan, const DecodePlan::Piece& piece, const LayerTensors& layer,
                                float* scratch) const {
    const std::size_t exchange_bytes = dtype_bytes(shape_.exchange_dtype);
    const auto sequence = static_cast<std::size_t>(piece.sequence);
    const auto first_head = static_cast<std::size_t>(piece.first_head);
    const std::size_t kv_row = (sequence * heads_.num_kv_heads + first_head) * shape_.head_dim * exchange_bytes;
    const std::size_t group_row = first_head * shape_.group * shape_.head_dim;
    const std::byte* q = layer.q + (sequence * layer.q_stride + group_row) * exchange_bytes;
    std::byte* out = layer.out + (sequence * layer.out_stride + group_row) * exchange_bytes;
    const std::int32_t* table = plan.batch_.block_tables + sequence * plan.batch_.stride;
    const HeadKv kv = head_kv(shape_, layer.pool, layer.scales, first_head, table);
    // Only the last span sees the new token.
    if (layer.k != nullptr && piece.span == piece.num_spans - 1) {
        const std::int32_t position = piece.end - 1;
        for (std::int32_t h = 0; h < piece.num_heads; ++h) {
            const std::size_t row = kv_row + h * shape_.head_dim * exchange_bytes;
            kernel_.write(shape_, head_kv(shape_, layer.pool, layer.scales, first_head + h, table),
                          {table[position / shape_.block_tokens], position % shape_.block_tokens, 1, layer.k + row,
                           layer.v + row, 0});
        }
    }
    if (piece.cut < 0) {
        kernel_.attend(shape_, kv, piece.num_heads, piece.begin, piece.end, q, scratch, nullptr, out);
        return;
    }
    float* partials = plan.partials_.get() + piece.first_partial * partial_floats(shape_);
    kernel_.attend(shape_, kv, piece.num_heads, piece.begin, piece.end, q, scratch,
                   partials + piece.span * piece.num_heads * partial_floats(shape_), nullptr);
    std::atomic<std::int32_t>& left = plan.spans_left_[piece.cut];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        kernel_.merge(shape_, partials, piece.num_spans, piece.num_heads, out);
        left.store(piece.num_spans, std::memory_order_relaxed);  // for the next layer
    }
}

}  // namespace neoflex
