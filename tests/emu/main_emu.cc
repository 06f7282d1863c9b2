/*
 * Makes the `kvpage` command one that has a GPU: linked with the command's own objects, this installs the
 * emulator before main. Operations run on a thread, as on a card.
 */
#include "tests/emu/driver.h"

namespace {

struct Install {
    Install()
    {
        emu_driver_options o = {};
        o.timing = EMU_THREAD;
        emu_install(&o);
    }
} install;

}
