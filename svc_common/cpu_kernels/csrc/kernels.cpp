#include "kernels.h"

#include <stdexcept>

namespace neoflex {

namespace {

std::vector<const Kernel*> find_runnable() {
    std::vector<const Kernel*> kernels{&scalar_kernel};
#if defined(NEOFLEX_X86)
    // Asks for the processor's features and for the operating system's support of their registers.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        kernels.push_back(&avx2_kernel);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            kernels.push_back(&avx512_kernel);
    }
#endif
#if defined(NEOFLEX_NEON)
    kernels.push_back(&neon_kernel);  // part of AArch64
#endif
    return kernels;
}

}  // namespace

const std::vector<const Kernel*>& runnable_kernels() {
    static const std::vector<const Kernel*> kernels = find_runnable();
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
