#include "experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace neoflex {

void choose_experts(const float* scores, std::int32_t num_rows, const Experts& experts,
                    std::vector<std::vector<Route>>& routes) {
    const auto num_experts = static_cast<std::int32_t>(routes.size());
    for (auto& of_expert : routes) of_expert.clear();
    std::vector<std::int32_t> order(num_experts);
    for (std::int32_t row = 0; row < num_rows; ++row, scores += num_experts) {
        std::iota(order.begin(), order.end(), 0);
        const auto chosen_end = order.begin() + experts.experts_per_token;
        std::partial_sort(order.begin(), chosen_end, order.end(), [&](std::int32_t a, std::int32_t b) {
            return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
        });
        const float largest = scores[order.front()];
        float sum = 0.0f;
        const auto summed_end = experts.normalised ? chosen_end : order.end();
        for (auto expert = order.begin(); expert != summed_end; ++expert) sum += std::exp(scores[*expert] - largest);
        for (auto expert = order.begin(); expert != chosen_end; ++expert)
            routes[*expert].push_back({row, std::exp(scores[*expert] - largest) / sum});
    }
}

}  // namespace neoflex
