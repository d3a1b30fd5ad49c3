// Element types to float32 and back.
#include "elements.h"
#include "kernels.h"

namespace fw::FW_ISA {

void widen(const void* source, int type, int64_t index, int64_t n, float* out) {
  with_numbers(type, [&](auto type) {
    const auto* from = elements(type, source, index);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, type.get(from + i));
    for (; i < n; ++i) out[i] = type.get1(from + i);
  });
}

void narrow(const float* source, int64_t n, int type, void* out, int64_t index) {
  with_elements(type, [&](auto type) {
    auto* to = static_cast<typename decltype(type)::Stored*>(out) + index;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) type.put(to + i, load<F32>(source + i));
    for (; i < n; ++i) type.put1(to + i, source[i]);
  });
}

}  // namespace fw::FW_ISA
