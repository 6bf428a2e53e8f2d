#include "kernels.h"

#include <stdexcept>

#include "processor.h"

namespace neoflex {

namespace {

bool always() { return true; }

struct Compiled {
    const Kernel& kernel;
    bool (*runs_here)();
};

// Slowest first.
constexpr Compiled compiled[] = {
    {scalar_kernel, always},
#if defined(NEOFLEX_X86)
    {avx2_kernel, has_avx2},
    {avx512_kernel, has_avx512},
    {avx512_bf16_kernel, has_avx512_bf16},
#endif
#if defined(NEOFLEX_NEON)
    {neon_kernel, always},  // part of AArch64
#endif
};

}  // namespace

const std::vector<const Kernel*>& runnable_kernels() {
    static const std::vector<const Kernel*> kernels = [] {
        std::vector<const Kernel*> runnable;
        for (const Compiled& one : compiled)
            if (one.runs_here()) runnable.push_back(&one.kernel);
        return runnable;
    }();
    return kernels;
}

std::vector<const Kernel*> compiled_kernels() {
    std::vector<const Kernel*> kernels;
    for (const Compiled& one : compiled) kernels.push_back(&one.kernel);
    return kernels;
}

const Kernel& choose_kernel(const std::string& instruction_set) {
    if (instruction_set == "auto") return *runnable_kernels().back();
    std::string names;
    for (const Kernel* kernel : runnable_kernels()) {
        if (kernel->name == instruction_set) return *kernel;
        names += std::string(names.empty() ? "" : ", ") + kernel->name;
    }
    throw std::invalid_argument("instruction set \"" + instruction_set + "\" does not run here; these do: " + names);
}

}  // namespace neoflex
