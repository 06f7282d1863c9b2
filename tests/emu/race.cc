#include "tests/emu/runtime.h"
namespace emu {
bool race_build() { return false; }
void race_block(engine *) {}
void race_sync(uint32_t) {}
void race_read(const void *, size_t, const char *) {}
void race_write(const void *, size_t, const char *) {}
void race_atomic(const void *, size_t) {}
void race_once(const void *, size_t) {}
void race_flight(const void *, size_t, bool) {}
void race_meet(warp *, uint32_t) {}
}
