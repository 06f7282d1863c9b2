# kvpage: GNU make, a C compiler, nothing else for `make`. `make help` lists the targets.
#
# CC, CPPFLAGS, CFLAGS, LDFLAGS and LDLIBS are the user's and are added to what is needed, never
# replaced. Everything made lies in build/<target>-<hash of compiler and flags>/, so that two
# configurations never mix; build/last points to the one that was made last.

.SUFFIXES:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# As many jobs as there are cores, unless the user says how many.
ifeq (,$(findstring -j,$(MAKEFLAGS))$(findstring jobserver,$(MAKEFLAGS)))
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1)
endif
SHELL = /bin/sh

VERSION := $(shell awk '/^.define KVP_VERSION_(MAJOR|MINOR|PATCH)/ {v = v s $$3; s = "."} \
                        END {print v}' include/kvpage.h)
SOVERSION := 0

ifeq ($(origin CC),default)
CC := cc
endif
ifeq ($(origin AR),default)
AR := ar
endif
NM ?= nm
CXX ?= c++
ifeq ($(origin CXX),default)
CXX := c++
endif

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BINDIR ?= $(PREFIX)/bin

# --- flags ---------------------------------------------------------------------------------------

TARGET := $(shell $(CC) -dumpmachine 2>/dev/null)
ARCH := $(firstword $(subst -, ,$(TARGET)))

WARN := -Wall -Wextra -Wpedantic -Wshadow -Wvla
# The user's flags stand between what may be overridden and what may not.
C_OPT := -O2 -g
C_MUST := -std=c11 -ffp-contract=off -fvisibility=hidden -fPIC -pthread
INC := -I. -Iinclude -Ilib
ALL_CFLAGS = $(C_OPT) $(WARN) $(CPPFLAGS) $(CFLAGS) $(SAN) $(C_MUST) $(INC)
ALL_LDFLAGS = $(LDFLAGS) $(SAN) -pthread
ALL_LDLIBS = $(LDLIBS) -lm -ldl

# Instruction-set levels: each file of lib/cpu/level is compiled once for each, with these flags.
# No other file may be: code of a higher level must not leak into what runs before the choice.
ifneq (,$(filter x86_64 amd64,$(ARCH)))
LEVELS := 1 2 3 5
else ifneq (,$(filter aarch64 arm64,$(ARCH)))
LEVELS := 1 4 6
else
LEVELS := 1
endif
LEVEL_FLAGS_1 :=
LEVEL_FLAGS_2 := -mavx2 -mfma -mf16c
LEVEL_FLAGS_3 := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
LEVEL_FLAGS_4 :=
LEVEL_FLAGS_5 := $(LEVEL_FLAGS_3) -mamx-tile -mamx-int8
# NEON with the dot product instructions: KVP__CPU_NEON_DOT in lib/cpu/kernels.h.
LEVEL_FLAGS_6 := -march=armv8.2-a+dotprod

# Under sanitizers the kernels, which are inlined into large functions, take gcc ten minutes a file
# where their locals are watched too; without that, and with the checks of undefined behaviour in plain
# C alone, which is the same source, seconds. clang, for fuzzing, watches plain C only.
ifneq (,$(SAN))
LEVEL_SAN := -O1
ifeq (,$(findstring clang,$(shell $(CC) --version 2>/dev/null)))
LEVEL_SAN += -fno-var-tracking --param asan-stack=0 -fno-sanitize-address-use-after-scope
LEVEL_SAN_2 := -fno-sanitize=undefined
LEVEL_SAN_3 := -fno-sanitize=undefined
LEVEL_SAN_5 := -fno-sanitize=undefined
else
LEVEL_SAN_2 := -fno-sanitize=all
LEVEL_SAN_3 := -fno-sanitize=all
LEVEL_SAN_5 := -fno-sanitize=all
endif
endif

# --- CUDA ----------------------------------------------------------------------------------------

# The kernels for the card are compiled where nvcc is; CUDA=0 leaves them out, CUDA=1 insists. The
# library is the same otherwise: its ABI, and its need of nothing but libc at run time.
NVCC ?= $(firstword $(wildcard $(shell command -v nvcc 2>/dev/null) /usr/local/cuda/bin/nvcc))
NVCC_RELEASE := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | \
    awk '/release/ {sub(/.*release /, ""); split($$0, v, /[.,]/); print v[1] * 1000 + v[2] * 10}'))
NVCC_FITS := $(shell [ "$(NVCC_RELEASE)" -ge 12080 ] 2>/dev/null && echo 1)
CUDA ?= $(if $(and $(NVCC_FITS),$(filter x86_64 amd64 aarch64 arm64,$(ARCH)),$(if $(SAN),,1)),1,0)
ifneq (,$(filter-out 0 1,$(CUDA)))
$(error CUDA=$(CUDA): 0 or 1)
endif
ifeq ($(CUDA)$(NVCC_FITS),1)
$(error CUDA=1 needs nvcc 12.8 or newer; NVCC=/path/nvcc says where it is)
endif
# Code for Hopper, and PTX that the driver compiles for anything from Ampere on; CUDA_RELEASE=1: code for
# all that are common.
CUDA_ARCHS := 90 $(if $(CUDA_RELEASE),80 89 100 120)
CUDA_CODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a,code=sm_$a) \
    -gencode arch=compute_80,code=compute_80
CUDA_FLAGS := -std=c++17 -O3 -I. $(CUDA_CODE) -compress-mode=size
CU_SRC := $(sort $(wildcard cuda/kernels/*.cu))

# --- where things go -----------------------------------------------------------------------------

KEY := $(shell { $(CC) --version 2>/dev/null; \
    printf '%s\n' '$(CC) $(ALL_CFLAGS) $(ALL_LDFLAGS) $(ALL_LDLIBS) $(FUZZ_LINK)' \
    '$(foreach l,$(LEVELS),$(LEVEL_FLAGS_$l) $(LEVEL_SAN_$l)) $(LEVEL_SAN)' \
    $(if $(filter 1,$(CUDA)),'$(NVCC) $(CUDA_FLAGS)'); } | cksum | cut -d' ' -f1)
B := build/$(if $(TARGET),$(TARGET),unknown)-$(KEY)

LIB_SRC := $(sort $(wildcard lib/*/*.c cuda/*.c))
# AMX has one kernel of its own, which the others do not have.
LEVEL_SRC := $(filter-out %/tiles.c,$(sort $(wildcard lib/cpu/level/*.c)))
level_objects = $(patsubst lib/cpu/level/%.c,$B/lib/cpu/level$1/%.o,\
    $(if $(filter 5,$1),lib/cpu/level/tiles.c lib/cpu/level/table.c,$(LEVEL_SRC)))
LIB_OBJ := $(LIB_SRC:%.c=$B/%.o) $(foreach l,$(LEVELS),$(call level_objects,$l))
SRC_SRC := $(sort $(wildcard src/*.c))
SRC_OBJ := $(SRC_SRC:%.c=$B/%.o)
EXAMPLE_SRC := $(sort $(wildcard examples/*.c))
EXAMPLES := $(EXAMPLE_SRC:%.c=$B/%)

SHARED := $B/libkvpage.so.$(VERSION)
STATIC := $B/libkvpage.a
TOOL := $(if $(SRC_SRC),$B/kvpage)

.PHONY: all
all: $(SHARED) $(STATIC) $(TOOL) $(EXAMPLES) build/last ## the library, the command, the examples

.PHONY: build/last
build/last: | $B
	@ln -sfn $(notdir $B) $@

$B:
	@mkdir -p $@

# --- the library, the command, the examples ------------------------------------------------------

COMPILE = @mkdir -p $(@D) && echo "  CC  $<" && $(CC) $(ALL_CFLAGS) $(EXTRA) -MMD -MP -c -o $@ $<

define level_rule
$B/lib/cpu/level$1/%.o: lib/cpu/level/%.c
	@mkdir -p $$(@D) && echo "  CC  $$< (level $1)" && \
	$$(CC) $$(ALL_CFLAGS) $$(LEVEL_SAN) $$(LEVEL_SAN_$1) $$(LEVEL_FLAGS_$1) -DKVP__LEVEL=$1 -MMD -MP -c -o $$@ $$<
endef
$(foreach l,$(LEVELS),$(eval $(call level_rule,$l)))

$B/lib/%.o: lib/%.c
	$(COMPILE)

$B/cuda/%.o: cuda/%.c
	$(COMPILE)

# The same for every configuration of the C code, so they have a folder of their own. A file is a
# thing of minutes; `-t 0`: architectures side by side.
ifeq ($(CUDA),1)
CU_KEY := $(shell { $(NVCC) --version; echo '$(CUDA_FLAGS)'; } | cksum | cut -d' ' -f1)
CU_DIR := build/cuda-$(CU_KEY)
IMAGES := $(patsubst cuda/kernels/%.cu,$(CU_DIR)/%.fatbin,$(CU_SRC))
$(CU_DIR)/%.fatbin: cuda/kernels/%.cu
	@mkdir -p $(@D) && echo "  NVCC  $<" && \
	$(NVCC) $(CUDA_FLAGS) -MMD -MP -MF $(@:.fatbin=.d) -MT $@ -fatbin -o $@ $<
$B/cuda/images.h: $(IMAGES)
	@mkdir -p $(@D) && for f in $(IMAGES); do n=$${f##*/}; \
	    echo "IMAGE($${n%.fatbin}, \"$$f\")"; done >$@
$B/cuda/image.o: EXTRA = $(if $(IMAGES),-DKVP__CUDA_TOOLKIT=$(NVCC_RELEASE) -DKVP__CUDA_IMAGES='"$B/cuda/images.h"')
$B/cuda/image.o: $B/cuda/images.h
-include $(wildcard $(CU_DIR)/*.d)
endif

$B/src/%.o: src/%.c
	$(COMPILE)

$B/examples/%.o: examples/%.c
	$(COMPILE)

$(STATIC): $(LIB_OBJ)
	@echo "  AR  $@" && rm -f $@ && $(AR) rcs $@ $(LIB_OBJ)

$(SHARED): $(LIB_OBJ) lib/kvpage.map
	@echo "  LD  $@" && $(CC) -shared -Wl,-soname,libkvpage.so.$(SOVERSION) \
	    -Wl,--version-script=lib/kvpage.map $(if $(SAN),,-Wl,-z,defs) -Wl,-z,relro,-z,now,-z,nodelete \
	    $(ALL_LDFLAGS) -o $@ $(LIB_OBJ) $(ALL_LDLIBS)
	@ln -sf $(@F) $B/libkvpage.so.$(SOVERSION) && ln -sf $(@F) $B/libkvpage.so

$B/kvpage: $(SRC_OBJ) $(STATIC)
	@echo "  LD  $@" && $(CC) $(ALL_LDFLAGS) -o $@ $(SRC_OBJ) $(STATIC) $(ALL_LDLIBS)

$(EXAMPLES): %: %.o $(STATIC)
	@echo "  LD  $@" && $(CC) $(ALL_LDFLAGS) -o $@ $< $(STATIC) $(ALL_LDLIBS)

# --- tests ---------------------------------------------------------------------------------------

# Each tests/<place>/test_*.c is a program; the other files of its folder and tests/support are
# linked to it. Internals are reachable: the static library hides nothing.
TEST_DIRS := $(sort $(patsubst %/,%,$(wildcard tests/unit/*/ tests/api/ tests/loop/ tests/cli/ tests/oom/)))
TEST_SRC := $(sort $(foreach d,$(TEST_DIRS),$(wildcard $d/test_*.c)))
TESTS := $(TEST_SRC:%.c=$B/%)
SUPPORT_SRC := $(sort $(wildcard tests/support/*.c))
SUPPORT := $B/libsupport.a

$(SUPPORT): $(SUPPORT_SRC:%.c=$B/%.o)
	@echo "  AR  $@" && rm -f $@ && $(AR) rcs $@ $^

# A foreign target has no CMocka; tests/cross has the little of it that our tests use.
HOST_ARCH := $(shell uname -m)
CROSS := $(if $(filter $(ARCH),$(HOST_ARCH)),,1)
CMOCKA := $(if $(CROSS),,-lcmocka)
# The probes are the vector operations themselves: kernels, as to sanitizers.
$B/tests/unit/cpu/vec_probe%.o: PROBE = $(LEVEL_SAN) $(LEVEL_SAN_2)
$B/tests/%.o: EXTRA = $(PROBE) $(if $(CROSS),-Itests/cross) -Itests -DKVPAGE_TESTS='"$(abspath tests)"'
$B/tests/%.o: tests/%.c | need-cmocka
	$(COMPILE)

TEST_LDFLAGS_tests/oom := -Wl,--wrap=mmap,--wrap=munmap,--wrap=pthread_create,--wrap=eventfd

define test_rule
TEST_HELP_$1 := $(patsubst %.c,$B/%.o,$(filter-out $1/test_%.c,$(wildcard $1/*.c)))
$(patsubst %.c,$B/%,$(wildcard $1/test_*.c)): %: %.o $$(TEST_HELP_$1) $(SUPPORT) $(STATIC)
	@echo "  LD  $$@" && $$(CC) $$(ALL_LDFLAGS) $$(TEST_LDFLAGS_$1) -o $$@ $$< \
	    $$(TEST_HELP_$1) $(SUPPORT) $(STATIC) $(CMOCKA) $$(ALL_LDLIBS)
endef
$(foreach d,$(TEST_DIRS),$(eval $(call test_rule,$d)))

# These run what was built.
$(filter $B/tests/cli/%,$(TESTS)): | $(TOOL) $(EXAMPLES) $(SHARED)

# --- the CUDA device on the CPU ---
# tests/emu: the kernels compiled by the C++ compiler, an emulator of the card and of the driver, and
# the device's own host code. Each program is built twice: as it is, and with every load and store of
# the kernels reported to the emulator, which then finds races (-fsanitize=thread in the kernels alone).
ifeq (,$(CROSS)$(findstring thread,$(SAN)))
EMU_TEST_SRC := $(sort $(wildcard tests/emu/test_*.cc))
EMU_MAIN_SRC := $(wildcard tests/emu/main_*.cc)
EMU_SRC := $(filter-out $(EMU_TEST_SRC) $(EMU_MAIN_SRC),$(sort $(wildcard tests/emu/*.cc)))
EMU_CU_SRC := $(CU_SRC) $(wildcard tests/emu/*.cu)
EMU_OBJ := $(EMU_SRC:%.cc=$B/%.o)
EMU_CU := $(EMU_CU_SRC:%.cu=$B/emu/plain/%.o)
EMU_CU_RACE := $(EMU_CU_SRC:%.cu=$B/emu/race/%.o)
EMU_TESTS := $(EMU_TEST_SRC:%.cc=$B/%)
EMU_RACE_TESTS := $(if $(SAN),,$(patsubst tests/emu/%.cc,$B/tests/emu/race/%,$(EMU_TEST_SRC)))
EMU_COMMAND := $(if $(EMU_MAIN_SRC),$B/tests/emu/kvpage_emu)
CXX_MUST := -std=c++17 -ffp-contract=off -fPIC -pthread
ALL_CXXFLAGS = $(C_OPT) -Wall -Wextra $(CPPFLAGS) $(CXXFLAGS) $(SAN) $(CXX_MUST) $(INC) -Itests \
    -DKVPAGE_TESTS='"$(abspath tests)"'
COMPILE_CXX = @mkdir -p $(@D) && echo "  CXX $<" && $(CXX) $(ALL_CXXFLAGS) $(EXTRA_CXX) -MMD -MP -c -o $@

$B/tests/emu/%.o: tests/emu/%.cc | need-cmocka need-cxx
	$(COMPILE_CXX) $<
$B/emu/plain/%.o: %.cu | need-cxx
	$(COMPILE_CXX) -x c++ $<
$B/emu/race/%.o: EXTRA_CXX = -fsanitize=thread -DKVP_EMU_RACE
$B/emu/race/%.o: %.cu | need-cxx
	$(COMPILE_CXX) -x c++ $<

EMU_LINK = @mkdir -p $(@D) && echo "  LD  $@" && $(CXX) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(SUPPORT) $(STATIC) \
    $(CMOCKA) $(ALL_LDLIBS)
$(EMU_TESTS): %: %.o $(EMU_OBJ) $(EMU_CU) $(SUPPORT) $(STATIC)
	$(EMU_LINK)
$(EMU_RACE_TESTS): $B/tests/emu/race/%: $B/tests/emu/%.o $(EMU_OBJ) $(EMU_CU_RACE) $(SUPPORT) $(STATIC)
	$(EMU_LINK)
$(EMU_COMMAND): $(EMU_MAIN_SRC:%.cc=$B/%.o) $(SRC_OBJ) $(EMU_OBJ) $(EMU_CU) $(STATIC)
	@echo "  LD  $@" && $(CXX) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(STATIC) $(ALL_LDLIBS)
endif

.PHONY: need-cxx
need-cxx:
	@CXX='$(CXX)' sh tests/tools/need.sh cxx

.PHONY: tests
tests: $(TESTS) $(EMU_TESTS) $(EMU_RACE_TESTS) ## build the test programs

# Order-only, so that its running does not count as a change.
.PHONY: need-cmocka
need-cmocka:
	@$(if $(CROSS),:,CC='$(CC)' CPPFLAGS='$(CPPFLAGS)' sh tests/tools/need.sh cmocka)

export CC CXX NM

# Programs without CMocka, which say by their exit status what they found.
LEVELS_SRC := $(sort $(wildcard tests/levels/levels_*.c))
LEVELS_PROGRAMS := $(LEVELS_SRC:%.c=$B/%)
$(LEVELS_PROGRAMS): %: %.o $(SUPPORT) $(STATIC)
	@echo "  LD  $@" && $(CC) $(ALL_LDFLAGS) -o $@ $< $(SUPPORT) $(STATIC) $(ALL_LDLIBS)

FUZZ_SRC := $(sort $(wildcard tests/fuzz/fuzz_*.c))
FUZZ := $(FUZZ_SRC:%.c=$B/%)
.PHONY: check
check: $(TESTS) $(EMU_TESTS) $(EMU_RACE_TESTS) $(EMU_COMMAND) $(FUZZ) $(LEVELS_PROGRAMS) all ## build and run every test; the last line counts them
	@FUZZ='$(FUZZ)' LEVELS='$(LEVELS_PROGRAMS)' sh tests/tools/check.sh $B $(TESTS) $(EMU_TESTS) $(EMU_RACE_TESTS)

.PHONY: check-emu check-emu-all
check-emu: $(EMU_TESTS) $(EMU_RACE_TESTS) $(EMU_COMMAND) ## the CUDA device's tests alone, on the emulator
	@sh tests/tools/check-emu.sh $B $(EMU_TESTS) $(EMU_RACE_TESTS)
check-emu-all: $(EMU_TESTS) $(EMU_RACE_TESTS) $(EMU_COMMAND) ## the same with every schedule and shape
	@KVPAGE_EMU_ALL=1 TEST_TIMEOUT=7200 sh tests/tools/check-emu.sh $B $(EMU_TESTS) $(EMU_RACE_TESTS)

# Each tests/fuzz/fuzz_*.c is a fuzz target: with a main of ours that replays files, or under
# libFuzzer when tests/fuzz/run.sh asks for it by FUZZ_LINK.
$(FUZZ): %: %.o $(if $(FUZZ_LINK),,$B/tests/fuzz/standalone.o) $(SUPPORT) $(STATIC)
	@echo "  LD  $@" && $(CC) $(ALL_LDFLAGS) $(FUZZ_LINK) -o $@ $(filter %.o,$^) $(SUPPORT) $(STATIC) \
	    $(CMOCKA) $(ALL_LDLIBS)

.PHONY: fuzz-programs print-fuzz fuzz fuzz-coverage sanitize mutants print-tests
fuzz-programs: $(FUZZ)
print-fuzz:
	@echo $(FUZZ)
fuzz: ## clang's libFuzzer, a minute per target (FUZZ_SECONDS)
	@sh tests/fuzz/run.sh
fuzz-coverage: ## lines of reader and tokenizer that the seeds reach
	@sh tests/fuzz/coverage.sh

# Each tests/bench/bench_*.c is a program, run with the model's path.
BENCH_SRC := $(sort $(wildcard tests/bench/bench_*.c))
BENCH := $(BENCH_SRC:%.c=$B/%)
$(BENCH): %: %.o $(STATIC)
	@echo "  LD  $@" && $(CC) $(ALL_LDFLAGS) -o $@ $< $(STATIC) $(ALL_LDLIBS)
$B/tests/bench/%.o: tests/bench/%.c
	@mkdir -p $(@D) && echo "  CC  $<" && $(CC) $(ALL_CFLAGS) -MMD -MP -c -o $@ $<

.PHONY: bench bench-peers demo
demo: ## fetch a small model (or MODEL=path) and show eight users in one batch
	@sh tests/tools/demo.sh
bench: $(BENCH) $(TOOL) ## measure speed and memory on the small model (or MODEL=path)
	@sh tests/bench/run.sh $(BENCH)
bench-peers: $(BENCH) ## beside llama.cpp, OpenVINO and vLLM, in turns (installs them)
	@sh tests/bench/peers/run.sh $B/tests/bench/bench_engine

# Other configurations of the same build: the scripts call make again with other flags.
sanitize: ## the tests under address, undefined-behaviour and thread sanitizers
	@sh tests/tools/sanitize.sh
mutants: ## plant faults in a copy, one at a time; the tests must catch each
	@sh tests/tools/need.sh fetch && python3 tests/mutants/run.py $(FAULTS)
print-tests:
	@echo $(TESTS) $(EMU_TESTS) $(EMU_RACE_TESTS)

.PHONY: cuda-budget ptx-lint cuda-coverage gpu-check
cuda-budget: ## registers and spills of the kernels, as nvcc compiles them, against their budget
	@NVCC='$(NVCC)' sh tests/tools/cuda-budget.sh
ptx-lint: ## the PTX behind the kernels' operations, operand by operand
	@python3 tests/tools/ptx-lint.py
cuda-coverage: ## lines of the CUDA device's host code that the tests reach
	@sh tests/tools/cuda-coverage.sh
gpu-check: all ## on a machine with a card: check and measure everything in one go
	@sh tests/gpu/run.sh

.PHONY: header check-includes forbidden abi-check consumers
header: ## the public header compiles alone in every standard
	@sh tests/tools/header.sh
check-includes: ## no room includes from above
	@sh tests/tools/check-includes.sh
forbidden: $(STATIC) ## the library calls nothing that would surprise its host
	@sh tests/tools/forbidden.sh $(STATIC)

abi-check: $(SHARED) ## symbols, layout, abidiff and an old binary against the library
	@sh tests/abi/run.sh $B
consumers: all ## hosts in C, C++ and Python against an installed tree
	@sh tests/consumer/run.sh

# The kernels and what depends on their bits, for Arm64 under emulation (tests/tools/neon.sh).
NEON_TESTS := $(filter $(addprefix $B/tests/unit/,base/% cpu/%),$(TESTS))

.PHONY: neon-tests print-neon print-levels
neon-tests: $(NEON_TESTS) $(LEVELS_PROGRAMS)
print-neon:
	@echo $(NEON_TESTS)
print-levels:
	@echo $(LEVELS_PROGRAMS)

# --- installing ----------------------------------------------------------------------------------

INSTALLED = $(INCLUDEDIR)/kvpage.h $(LIBDIR)/libkvpage.a $(LIBDIR)/libkvpage.so.$(VERSION) \
    $(LIBDIR)/libkvpage.so.$(SOVERSION) $(LIBDIR)/libkvpage.so $(LIBDIR)/pkgconfig/kvpage.pc \
    $(BINDIR)/kvpage

.PHONY: install uninstall
install: $(SHARED) $(STATIC) $(TOOL) ## into PREFIX (/usr/local), LIBDIR, INCLUDEDIR; DESTDIR is put in front
	install -d '$(DESTDIR)$(INCLUDEDIR)' '$(DESTDIR)$(LIBDIR)/pkgconfig' '$(DESTDIR)$(BINDIR)'
	install -m 644 include/kvpage.h '$(DESTDIR)$(INCLUDEDIR)/kvpage.h'
	install -m 644 $(STATIC) '$(DESTDIR)$(LIBDIR)/libkvpage.a'
	install -m 755 $(SHARED) '$(DESTDIR)$(LIBDIR)/libkvpage.so.$(VERSION)'
	ln -sf libkvpage.so.$(VERSION) '$(DESTDIR)$(LIBDIR)/libkvpage.so.$(SOVERSION)'
	ln -sf libkvpage.so.$(VERSION) '$(DESTDIR)$(LIBDIR)/libkvpage.so'
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(VERSION)|' \
	    -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' -e 's|@CUDA@|$(CUDA)|' kvpage.pc.in >'$(DESTDIR)$(LIBDIR)/pkgconfig/kvpage.pc'
	$(if $(TOOL),install -m 755 $(TOOL) '$(DESTDIR)$(BINDIR)/kvpage')

# Folders that are empty afterwards go too, unless they are the system's own.
uninstall: ## remove what install put there
	rm -f $(foreach f,$(INSTALLED),'$(DESTDIR)$f')
	-@$(if $(DESTDIR)$(filter-out /usr /usr/local,$(PREFIX)),rmdir '$(DESTDIR)$(LIBDIR)/pkgconfig' \
	    '$(DESTDIR)$(LIBDIR)' '$(DESTDIR)$(INCLUDEDIR)' '$(DESTDIR)$(BINDIR)' \
	    '$(DESTDIR)$(PREFIX)/lib' '$(DESTDIR)$(PREFIX)' 2>/dev/null || true)

.PHONY: clean
clean: ## remove everything that was built
	rm -rf build

.PHONY: help
help: ## this list
	@awk -F'## ' '/^[a-z-]+:.*## / {split($$1, t, ":"); printf "  %-16s %s\n", t[1], $$2}' \
	    $(firstword $(MAKEFILE_LIST))
	@echo "variables: CC, CFLAGS, PREFIX, DESTDIR, LIBDIR; CUDA=0|1, CUDA_RELEASE=1, NVCC (docs/building.md)"

-include $(shell test -d $B && find $B -name '*.d')
