// Which kernels this build has and this processor runs.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace neoflex {

// Slowest first; some may not run here.
std::vector<const Kernel*> compiled_kernels();

// Kernels that this processor runs, slowest first. Never empty.
const std::vector<const Kernel*>& runnable_kernels();

// The kernel of that name, or the fastest for "auto". Throws std::invalid_argument where it does not run here.
const Kernel& choose_kernel(const std::string& instruction_set);

}  // namespace neoflex
