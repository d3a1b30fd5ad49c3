// Which instruction sets there are, which can run here, and the table of kernels in use.
#pragma once

#include "kernels.h"

namespace fw {

constexpr int kIsaCount = 4;

struct Isa {
  const char* name;
  const Kernels* kernels;  // null where not built
  bool detected;
};

const Isa& isa(int index);  // 0 … kIsaCount - 1, in order of preference
int active_isa();
bool use_isa(int index);
const Kernels& kernels();  // of the active ISA

}  // namespace fw
