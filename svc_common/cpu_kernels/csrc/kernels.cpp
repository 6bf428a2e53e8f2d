#include "kernels.h"

#include <stdexcept>

namespace neoflex {

namespace {

#if defined(NEOFLEX_X86)
// Asks for the processor's features and for the operating system's support of their registers.
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

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
