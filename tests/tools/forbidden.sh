#!/bin/sh
# The library must leave its host alone: forbidden.sh libkvpage.a
# None of its objects may refer to what ends the process, writes to its streams, or reads or
# changes its environment, locale, signals, working directory or random state. Only cuda/load.c, which
# looks for the driver, may open libraries.
set -eu
${NM:-nm} -u "$1" | awk '
    BEGIN {
        n = split("abort exit _exit _Exit quick_exit atexit on_exit __assert_fail __assert " \
            "__assert_perror_fail __cxa_atexit printf fprintf vprintf vfprintf dprintf vdprintf puts " \
            "fputs putchar putc fputc fwrite perror psignal stdout stderr stdin __printf_chk " \
            "__fprintf_chk __vfprintf_chk __vprintf_chk __dprintf_chk __vdprintf_chk syslog " \
            "err errx warn warnx error getenv secure_getenv setenv unsetenv putenv clearenv " \
            "environ __environ signal sigaction bsd_signal sysv_signal __sysv_signal raise kill " \
            "alarm setitimer system popen fork vfork clone posix_spawn execve execv execvp " \
            "setlocale uselocale newlocale localeconv strtok rand srand random srandom rand_r " \
            "drand48 lrand48 chdir fchdir umask setrlimit longjmp siglongjmp _longjmp setjmp " \
            "dlopen gets tmpfile tmpnam mktemp strerror localtime gmtime ctime asctime " \
            "exp expf log logf pow powf sin sinf cos cosf tan tanf tanh tanhf exp2f log2f " \
            "sincos sincosf", names, " ")
        for (i = 1; i <= n; i++) forbidden[names[i]] = 1
    }
    /:$/ { object = $0; next }
    $1 == "U" || $1 == "w" {
        name = $2; sub(/@.*/, "", name); count++
        if (name == "dlopen" && object == "load.o:") { opens++; next }
        if (name in forbidden) { print object " calls " name; bad = 1 }
    }
    END {
        if (opens > 1) { print "more than one load.o opens libraries"; bad = 1 }
        printf "forbidden: %d references looked at\n", count
        exit bad || !count
    }
'
