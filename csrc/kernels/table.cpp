// The kernels of one ISA as a table.
#include "kernels.h"

namespace fw::FW_ISA {

extern const Kernels table;
const Kernels table = {
#define FW_ENTRY(result, name, parameters) name,
    FW_KERNELS(FW_ENTRY)
#undef FW_ENTRY
};

}  // namespace fw::FW_ISA
