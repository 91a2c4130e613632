/*
 * Makes gethostname() answer the job's name of this host.
 *
 * Some platforms give every container of a job the same hostname. MPI then treats ranks on different hosts as ranks of
 * one host. The launcher preloads this library only on such platforms, and sets TRAINWORKS_HOSTNAME to the name.
 * Without the variable, libc answers. uname() is not touched.
 *
 * Build: cc -shared -fPIC -O2 -Wall -Wextra -o libhostname.so hostname.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

int gethostname(char *name, size_t size)
{
    const char *wanted = getenv("TRAINWORKS_HOSTNAME");
    size_t length;

    if (wanted == NULL || *wanted == '\0') {
        int (*next)(char *, size_t);
        /* POSIX's way around the fact that ISO C has no cast from void * to a function pointer. */
        *(void **)(&next) = dlsym(RTLD_NEXT, "gethostname");
        if (next == NULL) {
            errno = ENOSYS;
            return -1;
        }
        return next(name, size);
    }
    length = strlen(wanted);
    if (length >= size) {
        /* As glibc does: fill the buffer, and return that it was too short. */
        memcpy(name, wanted, size);
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(name, wanted, length + 1);
    return 0;
}
