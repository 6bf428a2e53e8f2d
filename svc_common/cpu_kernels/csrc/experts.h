// Mixture of experts: which of a layer's MLPs each token goes through, and with which weight.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "linear.h"

namespace neoflex {

// Rows through `up`, whose activation makes the inner rows, and through `down`.
struct Mlp {
    PackedMatrix up;
    PackedMatrix down;
};

struct Experts {
    PackedMatrix router;  // [num_experts, hidden_size], fp32: a rounded score may choose another expert
    std::int32_t experts_per_token;
    bool normalised;  // whether the weights of a token's experts are made to add up to 1
    std::vector<Mlp> mlps;
    std::optional<Mlp> shared;                // that all tokens go through,
    std::optional<PackedMatrix> shared_gate;  // [1, hidden_size], by the sigmoid of this; both or neither
};

// A token's row that goes through an expert.
struct Route {
    std::int32_t row;
    float weight;
};

// Routes by expert, rows in order, of scores [num_rows, num_experts]: the softmax over all experts gives the weights, the
// largest are taken, of equal ones the first. `routes` has num_experts.
void choose_experts(const float* scores, std::int32_t num_rows, const Experts& experts,
                    std::vector<std::vector<Route>>& routes);

}  // namespace neoflex
