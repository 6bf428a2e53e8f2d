// Adds attention and KV writes to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace neoflex {

void bind_attention(nanobind::module_& m);

}  // namespace neoflex
