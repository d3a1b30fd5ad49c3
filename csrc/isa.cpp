// Detection by cpuid, and the choice, made once when the library is loaded.
#include "isa.h"

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fw {

namespace baseline {
extern const Kernels table;
}

#ifdef FW_BUILT_avx2
namespace avx2 {
extern const Kernels table;
}
constexpr const Kernels* kAvx2 = &avx2::table;
#else
constexpr const Kernels* kAvx2 = nullptr;
#endif

#ifdef FW_BUILT_avxvnni
namespace avxvnni {
extern const Kernels table;
}
constexpr const Kernels* kAvxVnni = &avxvnni::table;
#else
constexpr const Kernels* kAvxVnni = nullptr;
#endif

#ifdef FW_BUILT_avx512vnni
namespace avx512vnni {
extern const Kernels table;
}
constexpr const Kernels* kAvx512Vnni = &avx512vnni::table;
#else
constexpr const Kernels* kAvx512Vnni = nullptr;
#endif

namespace {

struct Cpu {
  bool avx2 = false, avxvnni = false, avx512vnni = false;
};

#if defined(__x86_64__)
bool bit(uint32_t word, int index) { return word >> index & 1; }

Cpu detect() {
  Cpu cpu;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
  const bool fma = bit(c, 12), xgetbv = bit(c, 27), f16c = bit(c, 29);
  if (!xgetbv) return cpu;
  uint32_t saved_low, saved_high;  // the registers that the operating system saves
  __asm__("xgetbv" : "=a"(saved_low), "=d"(saved_high) : "c"(0));
  const bool saves_ymm = (saved_low & 0x06) == 0x06, saves_zmm = (saved_low & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  cpu.avx2 = saves_ymm && fma && f16c && bit(b, 5);
  const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31), vnni = bit(c, 11);
  cpu.avx512vnni = cpu.avx2 && saves_zmm && f && dq && bw && vl && vnni;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.avxvnni = cpu.avx2 && bit(a, 4);
  return cpu;
}
#else
Cpu detect() { return {}; }
#endif

struct Choice {
  Isa isas[kIsaCount];
  int active = 0;

  explicit Choice(const Cpu& cpu)
      : isas{{"baseline", &baseline::table, true},
             {"avx2", kAvx2, cpu.avx2},
             {"avxvnni", kAvxVnni, cpu.avxvnni},
             {"avx512vnni", kAvx512Vnni, cpu.avx512vnni}} {
    for (int index = 0; index < kIsaCount; ++index) use(index);  // the last that can run stays
  }

  bool use(int index) {
    if (!isas[index].kernels || !isas[index].detected) return false;
    active = index;
    return true;
  }
};

Choice choice{detect()};

}  // namespace

const Isa& isa(int index) { return choice.isas[index]; }
int active_isa() { return choice.active; }
bool use_isa(int index) { return choice.use(index); }
const Kernels& kernels() { return *choice.isas[choice.active].kernels; }

}  // namespace fw
