/* Moves data between two hosts through NCCL's network plugin, as NCCL does it: by the plugin's own table of functions.
 *
 *   transfer listen PORT          waits for the other one
 *   transfer connect HOST PORT    calls it
 *
 * Both send 64 MiB and receive 64 MiB, at the same time, and compare every byte. It is a GPU's memory where the plugin says
 * that it takes that, else the host's: NCCL decides so, too. The last line says what came, and in which memory; the status
 * is 0 only if all of it was right. What the plugin itself says goes to stderr.
 */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PLUGIN "libnccl-net.so"
#define TABLE "ncclNetPlugin_v8"

enum { HANDLE_SIZE = 128, HOST_POINTER = 1, GPU_POINTER = 2, INFORMATION = 3 };
enum { MESSAGES = 16, MESSAGE_SIZE = 4 << 20, MEBIBYTE = 1 << 20 };
enum { DEADLINE = 120 }; /* seconds for everything */

typedef void (*logger)(int level, unsigned long subsystem, const char *file, int line, const char *format, ...);

/* The beginning of NCCL's ncclNetProperties_v8_t, and room for the rest. */
struct properties {
    char *name, *path;
    uint64_t number;
    int pointers;
    char rest[256];
};

/* NCCL's ncclNet_v8_t. Functions that are not called are there for the place that they take. */
struct net {
    const char *name;
    int (*init)(logger log);
    int (*devices)(int *count);
    int (*get_properties)(int device, void *properties);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **sender, void **sender_device);
    int (*accept)(void *listener, void **receiver, void **receiver_device);
    int (*register_memory)(void *link, void *data, size_t size, int type, void **memory);
    int (*register_dma_buffer)(void *link, void *data, size_t size, int type, uint64_t offset, int file, void **memory);
    int (*deregister_memory)(void *link, void *memory);
    int (*send)(void *sender, void *data, int size, int tag, void *memory, void **request);
    int (*receive)(void *receiver, int count, void **data, int *sizes, int *tags, void **memories, void **request);
    int (*flush)(void *receiver, int count, void **data, int *sizes, void **memories, void **request);
    int (*test)(void *request, int *done, int *sizes);
    int (*close_sender)(void *sender);
    int (*close_receiver)(void *receiver);
    int (*close_listener)(void *listener);
};

static void fail(const char *what, const char *why) {
    fprintf(stderr, "error: %s: %s\n", what, why);
    exit(1);
}

/* The plugin's functions answer with an ncclResult_t, of which 0 is success. */
#define CALL(expression)                                                  \
    do {                                                                  \
        int result = (expression);                                        \
        if (result) {                                                     \
            fprintf(stderr, "error: %s answers %d\n", #expression, result); \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

/* CUDA's driver, by which a program reaches a GPU's memory. */
static struct {
    int (*allocate)(uint64_t *address, size_t size);
    int (*copy_to)(uint64_t target, const void *source, size_t size);
    int (*copy_from)(void *target, uint64_t source, size_t size);
} driver;

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fail("libcuda.so.1", dlerror());
    *(void **)&driver.allocate = dlsym(library, "cuMemAlloc_v2");
    *(void **)&driver.copy_to = dlsym(library, "cuMemcpyHtoD_v2");
    *(void **)&driver.copy_from = dlsym(library, "cuMemcpyDtoH_v2");
    if (!driver.allocate || !driver.copy_to || !driver.copy_from) fail("libcuda.so.1", "it lacks a function");
}

static void *allocate(int on_gpu) {
    uint64_t address = 0;
    if (!on_gpu) return malloc(MESSAGE_SIZE);
    CALL(driver.allocate(&address, MESSAGE_SIZE));
    return (void *)(uintptr_t)address;
}

static void copy(void *target, const char *source, int to_gpu) {
    if (to_gpu) {
        CALL(driver.copy_to((uint64_t)(uintptr_t)target, source, MESSAGE_SIZE));
    } else {
        memcpy(target, source, MESSAGE_SIZE);
    }
}

static void say(int level, unsigned long subsystem, const char *file, int line, const char *format, ...) {
    (void)subsystem, (void)file, (void)line;
    if (level > INFORMATION) return;
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    va_end(words);
    fputc('\n', stderr);
}

/* A connection beside the plugin, as NCCL's bootstrap: handles go over it, and the word that all is done. */
static int meet(int count, char **arguments) {
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *address;
    int waits = count == 3 && !strcmp(arguments[1], "listen");
    if (!waits && !(count == 4 && !strcmp(arguments[1], "connect"))) {
        fail("usage", "transfer listen PORT, or transfer connect HOST PORT");
    }
    hints.ai_flags = waits ? AI_PASSIVE : 0;
    int problem = getaddrinfo(waits ? NULL : arguments[2], arguments[count - 1], &hints, &address);
    if (problem) fail(arguments[count - 1], gai_strerror(problem));
    if (waits) {
        int door = socket(AF_INET, SOCK_STREAM, 0);
        if (bind(door, address->ai_addr, address->ai_addrlen) || listen(door, 1)) fail("listen", strerror(errno));
        int found = accept(door, NULL, NULL);
        if (found < 0) fail("accept", strerror(errno));
        close(door);
        return found;
    }
    for (;;) {
        int found = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(found, address->ai_addr, address->ai_addrlen)) return found;
        /* The other one may not be there yet; the deadline ends this. */
        if (errno != ECONNREFUSED) fail("connect", strerror(errno));
        close(found);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
}

static void exchange(int other, const void *own, void *theirs, size_t size) {
    if (write(other, own, size) != (ssize_t)size) fail("the other host", "cannot be written to");
    for (size_t have = 0; have < size;) {
        ssize_t got = read(other, (char *)theirs + have, size - have);
        if (got <= 0) fail("the other host", "has gone");
        have += (size_t)got;
    }
}

/* No two places of any two messages, or of the two directions, have the same eight bytes. */
static void fill(uint64_t *data, uint64_t side, uint64_t message) {
    for (uint64_t index = 0; index < MESSAGE_SIZE / sizeof *data; index++) {
        data[index] = ((side << 56) | (message << 32) | index) * UINT64_C(0x9E3779B97F4A7C15);
    }
}


int main(int count, char **arguments) {
    alarm(DEADLINE);
    void *library = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(PLUGIN, dlerror());
    const struct net *net = dlsym(library, TABLE);
    if (!net) fail(TABLE, dlerror());
    int devices = 0;
    CALL(net->init(say));
    CALL(net->devices(&devices));
    if (devices < 1) fail(net->name, "it has no device");
    struct properties properties = {0};
    CALL(net->get_properties(0, &properties));
    int on_gpu = (properties.pointers & GPU_POINTER) != 0, pointer = on_gpu ? GPU_POINTER : HOST_POINTER;
    if (on_gpu) load_driver();

    int other = meet(count, arguments);
    uint64_t side = !strcmp(arguments[1], "listen");
    char own[HANDLE_SIZE] = {0}, theirs[HANDLE_SIZE];
    void *listener = NULL, *sender = NULL, *receiver = NULL, *unused = NULL;
    CALL(net->listen(0, own, &listener));
    exchange(other, own, theirs, HANDLE_SIZE);
    /* Neither of the two waits: each goes on a little whenever it is called. */
    while (!sender || !receiver) {
        if (!sender) CALL(net->connect(0, theirs, &sender, &unused));
        if (!receiver) CALL(net->accept(listener, &receiver, &unused));
    }

    void *outgoing = allocate(on_gpu), *incoming = allocate(on_gpu), *outgoing_memory = NULL, *incoming_memory = NULL;
    /* What is sent and what has come, where this program can touch it. */
    char *written = malloc(MESSAGE_SIZE), *seen = malloc(MESSAGE_SIZE), *expected = malloc(MESSAGE_SIZE);
    if (!outgoing || !incoming || !written || !seen || !expected) fail("memory", strerror(errno));
    CALL(net->register_memory(sender, outgoing, MESSAGE_SIZE, pointer, &outgoing_memory));
    CALL(net->register_memory(receiver, incoming, MESSAGE_SIZE, pointer, &incoming_memory));

    long wrong = 0;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int message = 0; message < MESSAGES; message++) {
        void *sending = NULL, *receiving = NULL;
        int size = MESSAGE_SIZE, sent = 0, received = 0;
        memset(seen, 0, MESSAGE_SIZE);
        fill((uint64_t *)(void *)written, side, (uint64_t)message);
        fill((uint64_t *)(void *)expected, !side, (uint64_t)message);
        copy(incoming, seen, on_gpu);
        copy(outgoing, written, on_gpu);
        while (!receiving) {
            CALL(net->receive(receiver, 1, &incoming, &size, &message, &incoming_memory, &receiving));
        }
        while (!sending) CALL(net->send(sender, outgoing, MESSAGE_SIZE, message, outgoing_memory, &sending));
        /* Both at once: a provider may need this side's progress for the other side's. */
        for (int sent_all = 0, received_all = 0; !sent_all || !received_all;) {
            if (!sent_all) CALL(net->test(sending, &sent_all, &sent));
            if (!received_all) CALL(net->test(receiving, &received_all, &received));
        }
        /* A GPU may see what has come later than the CPU: the plugin waits for it, if it has to. */
        if (on_gpu) {
            void *flushing = NULL;
            int flushed = 0, none = 0;
            CALL(net->flush(receiver, 1, &incoming, &size, &incoming_memory, &flushing));
            while (flushing && !flushed) CALL(net->test(flushing, &flushed, &none));
            CALL(driver.copy_from(seen, (uint64_t)(uintptr_t)incoming, MESSAGE_SIZE));
        } else {
            memcpy(seen, incoming, MESSAGE_SIZE);
        }
        wrong += labs((long)MESSAGE_SIZE - received);
        for (int index = 0; index < MESSAGE_SIZE; index++) wrong += seen[index] != expected[index];
    }
    clock_gettime(CLOCK_MONOTONIC, &end);

    /* Nobody closes what the other one still reads from. */
    char done = 1, theirs_done = 0;
    exchange(other, &done, &theirs_done, 1);
    CALL(net->deregister_memory(sender, outgoing_memory));
    CALL(net->deregister_memory(receiver, incoming_memory));
    CALL(net->close_sender(sender));
    CALL(net->close_receiver(receiver));
    CALL(net->close_listener(listener));
    printf(
        "%s: sent %d MiB, received %d MiB, %ld bytes differ, in %s memory, %.2f s\n", net->name,
        MESSAGES * (MESSAGE_SIZE / MEBIBYTE), MESSAGES * (MESSAGE_SIZE / MEBIBYTE), wrong,
        on_gpu ? "a GPU's" : "the host's",
        (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9
    );
    return wrong != 0;
}
