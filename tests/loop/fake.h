/*
 * A device that computes by itself, for tests of what the engine makes of one: a thread behind each
 * runner computes a step with the CPU device, so tokens are the CPU's, and results come late, in
 * odd order or never, as the test says. Registered as "fake" (kvp__device_use), four of them.
 */
#ifndef TESTS_LOOP_FAKE_H
#define TESTS_LOOP_FAKE_H

#include "device/device.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum fake_call {
    FAKE_NEVER,
    FAKE_SUPPORTS,
    FAKE_PLACE,
    FAKE_STORE,
    FAKE_RUNNER,
    FAKE_PREPARE,
    FAKE_LAUNCH,
    FAKE_BEGIN,
    FAKE_ATTEND
} fake_call;

/* What it does; set by the test before the call that it concerns. */
typedef struct fake_behaviour {
    fake_call refuses;    /* this call, with `refusal` */
    kvp_status refusal;
    bool chooses;         /* plain samplers: by itself */
    bool broken;          /* says that every token it chooses has broken logits */
    bool records;         /* attention goes into a graph of the host's */
    uint32_t delay_us;    /* before a step is over */
} fake_behaviour;

/* What it saw. */
typedef struct fake_record {
    uint32_t places, unplaces, stores, runners; /* calls that succeeded; stores and runners: alive */
    uint32_t steps, chosen, posted;
    uint32_t with_team, ordinal;
    void *stream;
    uint32_t attended, begun;
} fake_record;

/* With nothing odd about it, and the gate open. */
void fake_use(void);
void fake_give_up(void);
extern fake_behaviour fake;
fake_record fake_seen(void);

/* Steps stop short of their end while the gate is shut. */
void fake_shut(void);
void fake_open(void);
/* Whatever is in flight, and everything later, is lost; nothing says so but poll. */
void fake_lose(void);

#endif
