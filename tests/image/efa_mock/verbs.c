/* libibverbs.so.1 of the mock: EFA devices that are not there. README.md says what they do and how they are told.
 *
 * A queue pair is a listening TCP socket, and its number is the socket's port. The address of a card (its GID) has the
 * IPv4 address of its host. A request goes over a connection of the sender's queue pair to the receiver's, and its
 * answer comes back over the same one; only then the sender's work is complete. One thread of the library reads what
 * comes in, as a card does: without help from the program.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mock.h"

#undef ibv_query_port

/* Sizes that a card reports. The maximum of messages, the depths and the size of inline data are those of EFA's. */
enum { MESSAGE = 8928, SENDS = 4096, RECEIVES = 32768, SEND_PARTS = 2, RECEIVE_PARTS = 3, INLINE = 32 };
enum { LONGEST_TRANSFER = 1 << 30, QUEUE_PAIRS = 65536, MOST = 1 << 20, CARDS = 32 };
enum { GRH = 40 };            /* bytes before each message that a UD queue pair receives */
enum { NEVER_GIVE_UP = 7 };   /* of rnr_retry: ibv_modify_qp(3) */
enum { NO_NUMBER = 0xFFFF };  /* of an address that this card has no handle for */
enum { BATCH = 64 };          /* requests that may overtake each other: SRD keeps no order */
enum { SILENCE = 10000 };     /* milliseconds after which a host that does not answer is given up */

/* Results of an operation as an EFA device reports them to its driver; libfabric has a text for each. */
enum result {
    OK = 0,
    FLUSHED = 1,
    INVALID_LKEY = 5,
    TOO_LONG = 6,
    BAD_REMOTE_ADDRESS = 7,
    NO_SUCH_QUEUE_PAIR = 9,
    RECEIVER_NOT_READY = 10,
    BAD_REMOTE_LENGTH = 11,
    UNRESPONSIVE = 13,
    UNKNOWN_PEER = 14,
    UNREACHABLE = 15,
};

/* What each generation can do. */
static const struct {
    uint32_t part, abilities;
} GENERATIONS[] = {
    {0xefa0, 0},
    {0xefa1, EFADV_DEVICE_ATTR_CAPS_RDMA_READ | EFADV_DEVICE_ATTR_CAPS_RNR_RETRY | EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID},
    {0xefa2, EFADV_DEVICE_ATTR_CAPS_RDMA_READ | EFADV_DEVICE_ATTR_CAPS_RNR_RETRY | EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID |
                 EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE},
    {0xefa3, EFADV_DEVICE_ATTR_CAPS_RDMA_READ | EFADV_DEVICE_ATTR_CAPS_RNR_RETRY | EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID |
                 EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE | EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV},
};

enum kind { SEND, WRITE, READ, ANSWER };

struct header {
    uint8_t kind, result, immediate, gives_up;
    uint32_t source, target, key, data, region, length;
    uint64_t number, address;
    union ibv_gid card;
};

struct message {
    struct message *next;
    struct link *link; /* where it came from, or NULL: that has gone */
    size_t sent;
    struct header header;
    char data[];
};

struct part {
    char *data;
    size_t length;
};

struct work {
    struct work *next;
    uint64_t id, number;
    enum ibv_wc_opcode opcode;
    const struct address *address;
    struct ibv_sge pieces[RECEIVE_PARTS];
    int count, inlined;
    char inline_data[INLINE];
    uint32_t inline_length, target, key, region, data;
    uint64_t remote;
    uint8_t immediate;
};

struct completion {
    struct completion *next;
    uint64_t id;
    enum ibv_wc_opcode opcode;
    enum result result;
    uint32_t length, data, own, other;
    uint16_t address;
    uint8_t immediate, unsolicited;
    union ibv_gid card;
};

struct link {
    struct link *next;
    uint64_t serial;
    struct queue_pair *owner;
    int file, connecting, dead, answered;
    uint32_t host, port; /* of the other end; port 0: it called */
    struct header header;
    size_t read;
    struct message *incoming, *outgoing;
    struct work *waiting; /* for their answers */
    int watched;
};

struct card {
    struct ibv_device device;
    union ibv_gid gid;
    int generation;
    struct address *addresses;
};

struct context {
    struct verbs_context verbs;
    int node;
};

struct region {
    struct ibv_mr memory;
    struct region *next;
    char *content; /* where the card reaches it: for a GPU's memory not where the program names it */
    uint64_t start; /* the address by which work requests name it */
    unsigned access;
};

struct address {
    struct ibv_ah handle;
    struct address *next;
    struct card *card;
    union ibv_gid gid;
    uint16_t number;
};

struct queue {
    struct ibv_cq_ex verbs;
    struct efadv_cq efa;
    struct completion *first, *last, *current;
};

struct queue_pair {
    struct ibv_qp_ex verbs;
    struct queue_pair *next;
    struct card *card;
    struct queue *sends, *receives;
    uint64_t serial;
    int file, reliable, unsolicited, retries;
    uint32_t key, room;
    struct work *begun, *begun_last;    /* between ibv_wr_start and ibv_wr_complete */
    struct work *buffers, *buffers_last; /* posted to receive into */
    uint32_t buffer_count;
    struct message *parked, *parked_last; /* requests that wait for a buffer */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct card cards[CARDS];
static int card_count, events = -1;
static uint32_t own_host;
static struct link *links;
static struct queue_pair *queue_pairs;
static struct region *regions;
static uint64_t next_serial = 1, next_number = 1;
static uint32_t next_key = 1;
static size_t locked_pages;
static long refusals, until_lost = -1;
static int lost, unreachable, no_gpus;

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 10) : otherwise;
}

static void *zeroed(size_t size) {
    void *memory = calloc(1, size);
    if (!memory) abort();
    return memory;
}

/* Devices: those that /sys/class/infiniband lists. */

#define LISTED "/sys/class/infiniband"

/* The first address that is not the host's own: containers have one. */
static uint32_t find_host(void) {
    uint32_t found = htonl(INADDR_LOOPBACK);
    struct ifaddrs *all, *one;
    if (getifaddrs(&all)) return found;
    for (one = all; one; one = one->ifa_next) {
        if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET || one->ifa_flags & IFF_LOOPBACK) continue;
        found = ((struct sockaddr_in *)(void *)one->ifa_addr)->sin_addr.s_addr;
        break;
    }
    freeifaddrs(all);
    return found;
}

/* Reads which generation a card is of: the kernel has the number of its PCI device in a file. */
static int generation_of(const char *folder) {
    char path[512];
    unsigned part = 0;
    snprintf(path, sizeof path, "%s/device/device", folder);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%x", &part) != 1) part = 0;
    if (file) fclose(file);
    for (size_t index = 0; index < sizeof GENERATIONS / sizeof *GENERATIONS; index++) {
        if (GENERATIONS[index].part == part) return (int)index;
    }
    return -1;
}

static int is_name(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void find_cards(void) {
    struct dirent **names;
    int count = card_count ? 0 : scandir(LISTED, &names, is_name, versionsort);
    if (count < 1) return;
    refusals = setting("EFA_MOCK_RNR", 0);
    until_lost = setting("EFA_MOCK_LOSE", -1);
    unreachable = setting("EFA_MOCK_UNREACHABLE", 0) != 0;
    no_gpus = setting("EFA_MOCK_NO_GPUS", 0) != 0;
    own_host = find_host();
    for (int index = 0; index < count; index++) {
        struct card *card = &cards[card_count < CARDS ? card_count : CARDS - 1];
        struct ibv_device *device = &card->device;
        snprintf(device->name, sizeof device->name, "%.63s", names[index]->d_name);
        snprintf(device->dev_name, sizeof device->dev_name, "uverbs%d", index);
        snprintf(device->dev_path, sizeof device->dev_path, "/sys/class/infiniband_verbs/uverbs%d", index);
        snprintf(device->ibdev_path, sizeof device->ibdev_path, LISTED "/%.63s", names[index]->d_name);
        free(names[index]);
        card->generation = generation_of(device->ibdev_path);
        if (card->generation < 0 || card_count == CARDS) continue;
        memcpy(card->gid.raw, "\xfe\x80", 2);
        memcpy(card->gid.raw + 8, &own_host, 4);
        card->gid.raw[15] = (uint8_t)++card_count;
    }
    free(names);
}

struct ibv_device **ibv_get_device_list(int *count) {
    pthread_mutex_lock(&lock);
    find_cards();
    pthread_mutex_unlock(&lock);
    struct ibv_device **list = zeroed((size_t)(card_count + 1) * sizeof *list);
    for (int index = 0; index < card_count; index++) list[index] = &cards[index].device;
    if (count) *count = card_count;
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

static struct card *card_of(struct ibv_context *context) { return (struct card *)context->device; }

static uint32_t abilities_of(const struct card *card) { return GENERATIONS[card->generation].abilities; }

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes) {
    *attributes = (struct ibv_device_attr){
        .fw_ver = "0.0.0.0",
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 4096,
        .vendor_id = 0x1d0f,
        .vendor_part_id = GENERATIONS[card_of(context)->generation].part,
        .max_qp = QUEUE_PAIRS,
        .max_qp_wr = RECEIVES,
        .max_sge = SEND_PARTS,
        .max_sge_rd = 1,
        .max_cq = MOST,
        .max_cqe = MOST,
        .max_mr = MOST,
        .max_pd = MOST,
        .max_ah = NO_NUMBER,
        .phys_port_cnt = 1,
    };
    return 0;
}

void mock_query_device(struct ibv_context *context, struct efadv_device_attr *attributes) {
    uint32_t abilities = abilities_of(card_of(context));
    *attributes = (struct efadv_device_attr){
        .max_sq_wr = SENDS,
        .max_rq_wr = RECEIVES,
        .max_sq_sge = SEND_PARTS,
        .max_rq_sge = RECEIVE_PARTS,
        .inline_buf_size = INLINE,
        .device_caps = abilities,
        .max_rdma_size = abilities & EFADV_DEVICE_ATTR_CAPS_RDMA_READ ? LONGEST_TRANSFER : 0,
    };
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes, size_t size) {
    struct ibv_port_attr all = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = 1,
        .max_msg_sz = MESSAGE,
        .pkey_tbl_len = 1,
        .active_width = 2,  /* 4 lanes */
        .active_speed = 32, /* of 25 Gbit/s */
        .phys_state = 5,
        .link_layer = IBV_LINK_LAYER_UNSPECIFIED,
    };
    (void)context, (void)port;
    memcpy(attributes, &all, size < sizeof all ? size : sizeof all);
    return 0;
}

/* Old programs call this one, with the part of the structure that they know: up to link_layer and flags. */
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attributes) {
    return query_port(context, port, (void *)attributes, offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    if (port != 1 || index) return EINVAL;
    *gid = card_of(context)->gid;
    return 0;
}

/* Forks: a kernel from 5.13 on copies pages that a device uses, and nothing has to be done. */

enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

int ibv_fork_init(void) { return 0; }

/* Protection domains, memory, addresses. */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *domain = zeroed(sizeof *domain);
    domain->context = context;
    return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain) {
    free(domain);
    return 0;
}

/* Pages of memory that a device uses are locked: the kernel counts them, if the process may not lock without limit. */
static int may_lock(size_t pages) {
    struct rlimit limit;
    unsigned long long abilities = 0;
    char line[128];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "CapEff: %llx", &abilities);
    if (status) fclose(status);
    if (abilities >> 14 & 1) return 1; /* CAP_IPC_LOCK */
    return getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur == RLIM_INFINITY || pages * 4096 <= limit.rlim_cur;
}

static size_t pages_of(const struct ibv_mr *memory) {
    uintptr_t first = (uintptr_t)memory->addr / 4096, last = ((uintptr_t)memory->addr + memory->length + 4095) / 4096;
    return last - first;
}

/* Where a GPU's memory is reached: the tests' stand-in for CUDA's driver knows, if the program has loaded it. */
static char *memory_of_gpu(const void *data) {
    enum { MEMORY_TYPE = 2, DEVICE_MEMORY = 2 };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!driver) return NULL;
    unsigned type = 0;
    int (*ask)(void *, int, uint64_t) = (int (*)(void *, int, uint64_t))dlsym(driver, "cuPointerGetAttribute");
    void *(*reach)(uint64_t) = (void *(*)(uint64_t))dlsym(driver, "stand_in_memory");
    int failed = !ask || !reach || ask(&type, MEMORY_TYPE, (uintptr_t)data) || type != DEVICE_MEMORY;
    char *found = failed ? NULL : reach((uintptr_t)data);
    dlclose(driver);
    return found;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *data, size_t length, uint64_t start, unsigned access) {
    /* GPUs and cards reach each other from the second generation on; the kernel finds no page at other addresses. */
    char *content = memory_of_gpu(data);
    if (content && (no_gpus || !abilities_of(card_of(domain->context)))) {
        errno = EFAULT;
        return NULL;
    }
    struct region *region = zeroed(sizeof *region);
    region->memory = (struct ibv_mr){.context = domain->context, .pd = domain, .addr = data, .length = length};
    region->start = start;
    region->content = content ? content : data;
    region->access = access;
    pthread_mutex_lock(&lock);
    size_t pages = locked_pages + pages_of(&region->memory);
    int error = lost ? EIO : may_lock(pages) ? 0 : ENOMEM;
    if (!error) {
        locked_pages = pages;
        region->memory.lkey = region->memory.rkey = next_key++;
        region->next = regions;
        regions = region;
    }
    pthread_mutex_unlock(&lock);
    if (!error) return &region->memory;
    free(region);
    errno = error;
    return NULL;
}

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *data, size_t length, int access) {
    return ibv_reg_mr_iova2(domain, data, length, (uintptr_t)data, (unsigned)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(
    struct ibv_pd *domain, uint64_t offset, size_t length, uint64_t start, int file, int access
) {
    (void)domain, (void)offset, (void)length, (void)start, (void)file, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_dereg_mr(struct ibv_mr *memory) {
    pthread_mutex_lock(&lock);
    for (struct region **place = &regions; *place; place = &(*place)->next) {
        struct region *region = *place;
        if (&region->memory != memory) continue;
        *place = region->next;
        locked_pages -= pages_of(memory);
        free(region);
        break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static char *memory_at(uint32_t key, uint64_t address, size_t length, unsigned access) {
    for (struct region *region = regions; region; region = region->next) {
        if (region->memory.lkey != key) continue;
        uint64_t offset = address - region->start;
        if (address < region->start || offset + length > region->memory.length) return NULL;
        return (region->access & access) == access ? region->content + offset : NULL;
    }
    return NULL;
}

static uint16_t number_of(const struct card *card, const union ibv_gid *gid) {
    for (const struct address *one = card->addresses; one; one = one->next) {
        if (!memcmp(&one->gid, gid, sizeof *gid)) return one->number;
    }
    return NO_NUMBER;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *domain, struct ibv_ah_attr *attributes) {
    struct address *address = zeroed(sizeof *address);
    address->handle = (struct ibv_ah){.context = domain->context, .pd = domain};
    address->card = card_of(domain->context);
    address->gid = attributes->grh.dgid;
    pthread_mutex_lock(&lock);
    address->number = number_of(address->card, &address->gid);
    if (address->number == NO_NUMBER) address->number = (uint16_t)(next_serial++ % NO_NUMBER);
    address->next = address->card->addresses;
    address->card->addresses = address;
    pthread_mutex_unlock(&lock);
    return &address->handle;
}

uint16_t mock_address_number(struct ibv_ah *address) { return ((struct address *)address)->number; }

int ibv_destroy_ah(struct ibv_ah *handle) {
    struct address *address = (struct address *)handle;
    pthread_mutex_lock(&lock);
    for (struct address **place = &address->card->addresses; *place; place = &(*place)->next) {
        if (*place != address) continue;
        *place = address->next;
        break;
    }
    pthread_mutex_unlock(&lock);
    free(address);
    return 0;
}

/* Completion queues. All that follows up to the functions of the API is called with the lock held. */

static void complete(struct queue *queue, struct completion what) {
    struct completion *entry = zeroed(sizeof *entry);
    *entry = what;
    entry->next = NULL;
    if (queue->last) {
        queue->last->next = entry;
    } else {
        queue->first = entry;
    }
    queue->last = entry;
}

static void complete_work(struct queue_pair *pair, struct work *work, enum result result) {
    complete(pair->sends, (struct completion){
        .id = work->id, .opcode = work->opcode, .result = result, .own = pair->verbs.qp_base.qp_num,
        .other = work->target, .address = work->address ? work->address->number : NO_NUMBER,
    });
    pair->room++;
    free(work);
}

static void complete_receive(
    struct queue_pair *pair, const struct message *message, const struct work *buffer, uint32_t length, enum result result
) {
    const struct header *header = &message->header;
    complete(pair->receives, (struct completion){
        .id = buffer ? buffer->id : 0, .result = result, .length = length, .data = header->data,
        .opcode = header->kind == WRITE ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
        .own = pair->verbs.qp_base.qp_num, .other = header->source, .address = number_of(pair->card, &header->card),
        .immediate = header->immediate, .unsolicited = !buffer, .card = header->card,
    });
}

static struct work *take_buffer(struct queue_pair *pair) {
    struct work *buffer = pair->buffers;
    if (buffer) {
        pair->buffers = buffer->next;
        pair->buffer_count--;
    }
    if (!pair->buffers) pair->buffers_last = NULL;
    return buffer;
}

/* Connections. */

static void watch(struct link *link) {
    int wanted = EPOLLIN | (link->connecting || link->outgoing ? EPOLLOUT : 0);
    struct epoll_event event = {.events = (uint32_t)wanted, .data.u64 = link->serial};
    if (wanted == link->watched) return;
    epoll_ctl(events, link->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, link->file, &event);
    link->watched = wanted;
}

/* A connection that is dead is kept until nobody looks at it any more: reap(). */
static void give_up(struct link *link, enum result result) {
    if (link->dead) return;
    link->dead = 1;
    while (link->waiting) {
        struct work *work = link->waiting;
        link->waiting = work->next;
        complete_work(link->owner, work, result);
    }
    for (struct message *message = link->owner->parked; message; message = message->next) {
        if (message->link == link) message->link = NULL;
    }
}

static void reap(void) {
    for (struct link **place = &links; *place;) {
        struct link *link = *place;
        if (!link->dead) {
            place = &link->next;
            continue;
        }
        *place = link->next;
        close(link->file);
        free(link->incoming);
        while (link->outgoing) {
            struct message *message = link->outgoing;
            link->outgoing = message->next;
            free(message);
        }
        free(link);
    }
}

static enum result result_of(const struct link *link, int error) {
    if (error == ECONNREFUSED || error == ECONNRESET || error == EPIPE || !error) return NO_SUCH_QUEUE_PAIR;
    return link->answered ? UNRESPONSIVE : UNREACHABLE;
}

static struct link *new_link(struct queue_pair *owner, int file) {
    struct link *link = zeroed(sizeof *link);
    int yes = 1, silence = SILENCE;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(file, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof silence);
    link->serial = next_serial++;
    link->owner = owner;
    link->file = file;
    link->next = links;
    links = link;
    return link;
}

static struct link *link_to(struct queue_pair *pair, uint32_t host, uint32_t port) {
    for (struct link *link = links; link; link = link->next) {
        if (link->owner == pair && link->host == host && link->port == port && !link->dead) return link;
    }
    int file = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = own_host};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = host, .sin_port = htons((uint16_t)port)};
    struct link *link = new_link(pair, file);
    link->host = host;
    link->port = port;
    if (unreachable) {
        give_up(link, UNREACHABLE);
        return link;
    }
    bind(file, (struct sockaddr *)&from, sizeof from);
    link->connecting = connect(file, (struct sockaddr *)&to, sizeof to) && errno == EINPROGRESS;
    watch(link);
    return link;
}

static void flush(struct link *link) {
    while (link->outgoing && !link->connecting && !link->dead) {
        struct message *message = link->outgoing;
        size_t head = sizeof message->header, length = message->header.kind == READ ? 0 : message->header.length;
        size_t head_sent = message->sent < head ? message->sent : head, data_sent = message->sent - head_sent;
        struct iovec pieces[] = {
            {(char *)&message->header + head_sent, head - head_sent}, {message->data + data_sent, length - data_sent},
        };
        ssize_t sent = sendmsg(link->file, &(struct msghdr){.msg_iov = pieces, .msg_iovlen = 2}, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (sent < 0) {
            give_up(link, result_of(link, errno));
            return;
        }
        message->sent += (size_t)sent;
        if (message->sent < head + length) continue;
        link->outgoing = message->next;
        free(message);
    }
    if (!link->dead) watch(link);
}

static struct message *new_message(struct header header, size_t length) {
    struct message *message = malloc(sizeof *message + length);
    if (!message) abort();
    *message = (struct message){.header = header};
    return message;
}

static void send_message(struct link *link, struct message *message) {
    struct message **place = &link->outgoing;
    while (*place) place = &(*place)->next;
    *place = message;
    flush(link);
}

static void answer(struct message *request, enum result result, const char *data, uint32_t length) {
    if (!request->link || request->link->dead) return;
    struct header header = {.kind = ANSWER, .result = (uint8_t)result, .number = request->header.number, .length = length};
    struct message *message = new_message(header, length);
    if (length) memcpy(message->data, data, length);
    send_message(request->link, message);
}

/* What comes in. */

static enum result fill(const struct work *buffer, const char *data, size_t length, size_t skip) {
    for (int index = 0; index < buffer->count && length; index++) {
        const struct ibv_sge *piece = &buffer->pieces[index];
        size_t room = piece->length > skip ? piece->length - skip : 0, part = length < room ? length : room;
        char *place = memory_at(piece->lkey, piece->addr, piece->length, IBV_ACCESS_LOCAL_WRITE);
        if (!place) return INVALID_LKEY;
        memcpy(place + skip, data, part);
        skip -= piece->length < skip ? piece->length : skip;
        data += part;
        length -= part;
    }
    return length ? BAD_REMOTE_LENGTH : OK;
}

/* Returns whether the request is done with; otherwise it waits for a buffer. */
static int receive(struct queue_pair *pair, struct message *message) {
    struct header *header = &message->header;
    uint32_t abilities = abilities_of(pair->card);
    int state = pair->verbs.qp_base.state, needs_buffer = header->kind == SEND;
    char *place;
    if ((state != IBV_QPS_RTR && state != IBV_QPS_RTS) || header->key != pair->key || lost) {
        answer(message, NO_SUCH_QUEUE_PAIR, NULL, 0);
        return 1;
    }
    if (header->kind == WRITE && header->immediate && !pair->unsolicited) needs_buffer = 1;
    if (header->kind == SEND && refusals) {
        refusals -= refusals > 0;
        answer(message, pair->reliable ? RECEIVER_NOT_READY : OK, NULL, 0);
        return 1;
    }
    if (needs_buffer && !pair->buffers) {
        if (pair->reliable && !header->gives_up) return 0;
        answer(message, pair->reliable ? RECEIVER_NOT_READY : OK, NULL, 0);
        return 1;
    }
    if (header->kind == SEND) {
        size_t skip = pair->reliable ? 0 : GRH;
        struct work *buffer = take_buffer(pair);
        enum result result = fill(buffer, message->data, header->length, skip);
        complete_receive(pair, message, buffer, (uint32_t)(header->length + skip), result);
        free(buffer);
        answer(message, result, NULL, 0);
        return 1;
    }
    /* RDMA: the other card must be known here, the card able, and the memory offered. */
    if (number_of(pair->card, &header->card) == NO_NUMBER) {
        answer(message, UNKNOWN_PEER, NULL, 0);
        return 1;
    }
    int write = header->kind == WRITE;
    place = memory_at(
        header->region, header->address, header->length, write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ
    );
    if (!place || !(abilities & (write ? EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE : EFADV_DEVICE_ATTR_CAPS_RDMA_READ))) {
        answer(message, BAD_REMOTE_ADDRESS, NULL, 0);
        return 1;
    }
    if (write) memcpy(place, message->data, header->length);
    if (write && header->immediate) {
        struct work *buffer = needs_buffer ? take_buffer(pair) : NULL;
        complete_receive(pair, message, buffer, header->length, OK);
        free(buffer);
    }
    answer(message, OK, write ? NULL : place, write ? 0 : header->length);
    return 1;
}

static void lose_cards(void) {
    lost = 1;
    for (struct link *link = links; link; link = link->next) give_up(link, FLUSHED);
    for (struct queue_pair *pair = queue_pairs; pair; pair = pair->next) {
        struct message none = {0};
        for (struct work *buffer; (buffer = take_buffer(pair)); free(buffer)) {
            complete_receive(pair, &none, buffer, 0, FLUSHED);
        }
    }
}

static void finish(struct link *link, struct message *message) {
    struct work **place = &link->waiting, *work;
    while (*place && (*place)->number != message->header.number) place = &(*place)->next;
    work = *place;
    if (!work) return;
    *place = work->next;
    enum result result = message->header.result;
    link->answered = 1;
    if (!result && work->opcode == IBV_WC_RDMA_READ) result = fill(work, message->data, message->header.length, 0);
    complete_work(link->owner, work, result);
    if (until_lost > 0 && !--until_lost) lose_cards();
}

static void take(struct link *link, struct message *message) {
    struct queue_pair *pair = link->owner;
    message->link = link;
    message->next = NULL;
    if (message->header.kind == ANSWER) {
        finish(link, message);
    } else if (!receive(pair, message)) {
        if (pair->parked_last) {
            pair->parked_last->next = message;
        } else {
            pair->parked = message;
        }
        pair->parked_last = message;
        return;
    }
    free(message);
}

/* Reads what is there. What came together is taken last first: SRD delivers, but keeps no order. */
static void read_link(struct link *link) {
    const size_t head = sizeof link->header;
    struct message *batch = NULL;
    ssize_t got = 1;
    for (int count = 0; count < BATCH;) {
        size_t length = link->header.kind == READ ? 0 : link->header.length;
        got = link->read < head
                  ? recv(link->file, (char *)&link->header + link->read, head - link->read, 0)
                  : recv(link->file, link->incoming->data + link->read - head, head + length - link->read, 0);
        if (got <= 0) break;
        link->read += (size_t)got;
        if (link->read < head) continue;
        length = link->header.kind == READ ? 0 : link->header.length;
        if (!link->incoming) link->incoming = new_message(link->header, length);
        if (link->read < head + length) continue;
        link->incoming->next = batch;
        batch = link->incoming;
        link->incoming = NULL;
        link->read = 0;
        count++;
    }
    int error = got < 0 ? errno : 0;
    while (batch) {
        struct message *message = batch;
        batch = message->next;
        take(link, message);
    }
    if (got <= 0 && error != EAGAIN && error != EINTR) give_up(link, result_of(link, error));
}

static void accept_links(struct queue_pair *pair) {
    for (int file; (file = accept4(pair->file, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        watch(new_link(pair, file));
    }
}

static void handle(uint64_t serial, uint32_t what) {
    for (struct queue_pair *pair = queue_pairs; pair; pair = pair->next) {
        if (pair->serial == serial) accept_links(pair);
    }
    for (struct link *link = links; link; link = link->next) {
        if (link->serial != serial || link->dead) continue;
        if (link->connecting && what & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
            int error = 0;
            socklen_t size = sizeof error;
            getsockopt(link->file, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error) {
                give_up(link, result_of(link, error));
                break;
            }
            link->connecting = 0;
        }
        if (what & (EPOLLIN | EPOLLERR | EPOLLHUP)) read_link(link);
        flush(link);
        break;
    }
    reap();
}

static void *work_as_card(void *unused) {
    (void)unused;
    for (;;) {
        struct epoll_event event;
        if (epoll_wait(events, &event, 1, -1) < 1) continue;
        pthread_mutex_lock(&lock);
        handle(event.data.u64, event.events);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void start_working(void) {
    pthread_t thread;
    sigset_t all, before;
    if (events >= 0) return;
    events = epoll_create1(EPOLL_CLOEXEC);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, work_as_card, NULL)) abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Work requests: ibv_wr_post(3). */

static struct queue_pair *pair_of(struct ibv_qp_ex *verbs) { return (struct queue_pair *)verbs; }

static void wr_start(struct ibv_qp_ex *verbs) { (void)verbs; }

static struct work *begin(struct ibv_qp_ex *verbs, enum ibv_wc_opcode opcode) {
    struct queue_pair *pair = pair_of(verbs);
    struct work *work = zeroed(sizeof *work);
    work->id = verbs->wr_id;
    work->opcode = opcode;
    if (pair->begun_last) {
        pair->begun_last->next = work;
    } else {
        pair->begun = work;
    }
    pair->begun_last = work;
    return work;
}

static void wr_send(struct ibv_qp_ex *verbs) { begin(verbs, IBV_WC_SEND); }

static void wr_send_imm(struct ibv_qp_ex *verbs, __be32 data) {
    struct work *work = begin(verbs, IBV_WC_SEND);
    work->immediate = 1;
    work->data = data;
}

static void wr_rdma_write(struct ibv_qp_ex *verbs, uint32_t key, uint64_t address) {
    struct work *work = begin(verbs, IBV_WC_RDMA_WRITE);
    work->region = key;
    work->remote = address;
}

static void wr_rdma_write_imm(struct ibv_qp_ex *verbs, uint32_t key, uint64_t address, __be32 data) {
    wr_rdma_write(verbs, key, address);
    pair_of(verbs)->begun_last->immediate = 1;
    pair_of(verbs)->begun_last->data = data;
}

static void wr_rdma_read(struct ibv_qp_ex *verbs, uint32_t key, uint64_t address) {
    struct work *work = begin(verbs, IBV_WC_RDMA_READ);
    work->region = key;
    work->remote = address;
}

static void wr_set_ud_addr(struct ibv_qp_ex *verbs, struct ibv_ah *address, uint32_t target, uint32_t key) {
    struct work *work = pair_of(verbs)->begun_last;
    work->address = (struct address *)address;
    work->target = target;
    work->key = key;
}

static void wr_set_sge_list(struct ibv_qp_ex *verbs, size_t count, const struct ibv_sge *pieces) {
    struct work *work = pair_of(verbs)->begun_last;
    work->count = count < RECEIVE_PARTS ? (int)count : RECEIVE_PARTS;
    memcpy(work->pieces, pieces, (size_t)work->count * sizeof *pieces);
}

static void wr_set_sge(struct ibv_qp_ex *verbs, uint32_t key, uint64_t address, uint32_t length) {
    wr_set_sge_list(verbs, 1, &(struct ibv_sge){.addr = address, .length = length, .lkey = key});
}

static void wr_set_inline_data_list(struct ibv_qp_ex *verbs, size_t count, const struct ibv_data_buf *pieces) {
    struct work *work = pair_of(verbs)->begun_last;
    work->inlined = 1;
    for (size_t index = 0; index < count; index++) {
        size_t room = INLINE - work->inline_length, length = pieces[index].length < room ? pieces[index].length : room;
        memcpy(work->inline_data + work->inline_length, pieces[index].addr, length);
        work->inline_length += (uint32_t)length;
    }
}

static void wr_set_inline_data(struct ibv_qp_ex *verbs, void *data, size_t length) {
    wr_set_inline_data_list(verbs, 1, &(struct ibv_data_buf){.addr = data, .length = length});
}

static void post(struct queue_pair *pair, struct work *work) {
    static const enum kind KINDS[] = {[IBV_WC_SEND] = SEND, [IBV_WC_RDMA_WRITE] = WRITE, [IBV_WC_RDMA_READ] = READ};
    uint32_t length = work->inline_length, host, done = 0;
    for (int index = 0; index < work->count; index++) length += work->pieces[index].length;
    pair->room--;
    work->next = NULL;
    if (lost || length > (work->opcode == IBV_WC_SEND ? (uint32_t)MESSAGE : (uint32_t)LONGEST_TRANSFER)) {
        complete_work(pair, work, lost ? FLUSHED : TOO_LONG);
        return;
    }
    struct header header = {
        .kind = (uint8_t)KINDS[work->opcode], .immediate = work->immediate,
        .gives_up = pair->retries != NEVER_GIVE_UP, .source = pair->verbs.qp_base.qp_num, .target = work->target,
        .key = work->key, .data = work->data, .region = work->region, .length = length, .number = next_number++,
        .address = work->remote, .card = pair->card->gid,
    };
    struct message *message = new_message(header, header.kind == READ ? 0 : length);
    memcpy(message->data, work->inline_data, work->inline_length);
    for (int index = 0; index < work->count; index++) {
        const struct ibv_sge *piece = &work->pieces[index];
        char *data = memory_at(piece->lkey, piece->addr, piece->length, 0);
        if (!data && piece->length) {
            free(message);
            complete_work(pair, work, INVALID_LKEY);
            return;
        }
        if (header.kind != READ) memcpy(message->data + done, data, piece->length);
        done += piece->length;
    }
    memcpy(&host, work->address->gid.raw + 8, 4);
    struct link *link = link_to(pair, host, work->target);
    work->number = header.number;
    if (link->dead) {
        free(message);
        complete_work(pair, work, UNREACHABLE);
        return;
    }
    work->next = link->waiting;
    link->waiting = work;
    send_message(link, message);
}

static int wr_complete(struct ibv_qp_ex *verbs) {
    struct queue_pair *pair = pair_of(verbs);
    uint32_t count = 0;
    struct work *work;
    pthread_mutex_lock(&lock);
    for (work = pair->begun; work; work = work->next) count++;
    int full = count > pair->room;
    while ((work = pair->begun)) {
        pair->begun = work->next;
        if (full) {
            free(work);
        } else {
            post(pair, work);
        }
    }
    pair->begun_last = NULL;
    reap();
    pthread_mutex_unlock(&lock);
    return full ? ENOMEM : 0;
}

static void wr_abort(struct ibv_qp_ex *verbs) {
    struct queue_pair *pair = pair_of(verbs);
    for (struct work *work; (work = pair->begun); free(work)) pair->begun = work->next;
    pair->begun_last = NULL;
}

static int post_recv(struct ibv_qp *verbs, struct ibv_recv_wr *request, struct ibv_recv_wr **bad) {
    struct queue_pair *pair = (struct queue_pair *)verbs;
    int error = 0;
    pthread_mutex_lock(&lock);
    for (; request; request = request->next) {
        if (request->num_sge > RECEIVE_PARTS || pair->buffer_count == RECEIVES) {
            error = request->num_sge > RECEIVE_PARTS ? EINVAL : ENOMEM;
            *bad = request;
            break;
        }
        struct work *buffer = zeroed(sizeof *buffer);
        buffer->id = request->wr_id;
        buffer->count = request->num_sge;
        memcpy(buffer->pieces, request->sg_list, (size_t)buffer->count * sizeof *buffer->pieces);
        if (pair->buffers_last) {
            pair->buffers_last->next = buffer;
        } else {
            pair->buffers = buffer;
        }
        pair->buffers_last = buffer;
        pair->buffer_count++;
    }
    while (pair->parked && pair->buffers) {
        struct message *message = pair->parked;
        pair->parked = message->next;
        if (!pair->parked) pair->parked_last = NULL;
        if (message->link) receive(pair, message);
        free(message);
    }
    if (lost) lose_cards();
    reap();
    pthread_mutex_unlock(&lock);
    return error;
}

/* Completion queues: ibv_create_cq_ex(3). The provider polls one queue from one thread at a time. */

static int next_poll(struct ibv_cq_ex *verbs) {
    static const enum ibv_wc_status STATUSES[] = {
        [FLUSHED] = IBV_WC_WR_FLUSH_ERR, [INVALID_LKEY] = IBV_WC_LOC_PROT_ERR, [TOO_LONG] = IBV_WC_LOC_LEN_ERR,
        [BAD_REMOTE_ADDRESS] = IBV_WC_REM_ACCESS_ERR, [NO_SUCH_QUEUE_PAIR] = IBV_WC_REM_INV_RD_REQ_ERR,
        [RECEIVER_NOT_READY] = IBV_WC_RNR_RETRY_EXC_ERR, [BAD_REMOTE_LENGTH] = IBV_WC_REM_INV_REQ_ERR,
        [UNRESPONSIVE] = IBV_WC_RESP_TIMEOUT_ERR, [UNKNOWN_PEER] = IBV_WC_REM_OP_ERR,
        [UNREACHABLE] = IBV_WC_RESP_TIMEOUT_ERR,
    };
    struct queue *queue = (struct queue *)verbs;
    pthread_mutex_lock(&lock);
    struct completion *entry = queue->first;
    if (entry) queue->first = entry->next;
    if (!queue->first) queue->last = NULL;
    pthread_mutex_unlock(&lock);
    if (!entry) {
        sched_yield(); /* programs poll without a pause, and the other one may wait for this core */
        return ENOENT;
    }
    free(queue->current);
    queue->current = entry;
    verbs->wr_id = entry->id;
    verbs->status = STATUSES[entry->result];
    return 0;
}

static int start_poll(struct ibv_cq_ex *verbs, struct ibv_poll_cq_attr *attributes) {
    return attributes->comp_mask ? EINVAL : next_poll(verbs);
}

static void end_poll(struct ibv_cq_ex *verbs) { (void)verbs; }

static const struct completion *current(struct ibv_cq_ex *verbs) { return ((struct queue *)verbs)->current; }

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *verbs) { return current(verbs)->opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex *verbs) { return current(verbs)->result; }
static uint32_t read_byte_len(struct ibv_cq_ex *verbs) { return current(verbs)->length; }
static __be32 read_imm_data(struct ibv_cq_ex *verbs) { return current(verbs)->data; }
static uint32_t read_qp_num(struct ibv_cq_ex *verbs) { return current(verbs)->own; }
static uint32_t read_src_qp(struct ibv_cq_ex *verbs) { return current(verbs)->other; }
static unsigned read_wc_flags(struct ibv_cq_ex *verbs) { return current(verbs)->immediate ? IBV_WC_WITH_IMM : 0; }
static uint32_t read_slid(struct ibv_cq_ex *verbs) { return current(verbs)->address; }
static uint8_t read_nothing(struct ibv_cq_ex *verbs) { return (void)verbs, 0; }

static struct queue *queue_of(struct efadv_cq *efa) {
    return (struct queue *)(void *)((char *)efa - offsetof(struct queue, efa));
}

static int wc_read_sgid(struct efadv_cq *efa, union ibv_gid *gid) {
    struct queue *queue = queue_of(efa);
    if (!queue->current || queue->current->address != NO_NUMBER) return ENOENT;
    *gid = queue->current->card;
    return 0;
}

static bool wc_is_unsolicited(struct efadv_cq *efa) { return queue_of(efa)->current->unsolicited; }

struct ibv_cq_ex *mock_create_cq(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attributes) {
    struct queue *queue = zeroed(sizeof *queue);
    queue->verbs = (struct ibv_cq_ex){
        .context = context, .channel = attributes->channel, .cq_context = attributes->cq_context,
        .cqe = (int)attributes->cqe, .start_poll = start_poll, .next_poll = next_poll, .end_poll = end_poll,
        .read_opcode = read_opcode, .read_vendor_err = read_vendor_err, .read_byte_len = read_byte_len,
        .read_imm_data = read_imm_data, .read_qp_num = read_qp_num, .read_src_qp = read_src_qp,
        .read_wc_flags = read_wc_flags, .read_slid = read_slid, .read_sl = read_nothing,
        .read_dlid_path_bits = read_nothing,
    };
    queue->efa.wc_read_sgid = wc_read_sgid;
    queue->efa.wc_is_unsolicited = wc_is_unsolicited;
    return &queue->verbs;
}

struct efadv_cq *mock_efa_cq(struct ibv_cq_ex *verbs) { return &((struct queue *)verbs)->efa; }

static struct ibv_cq_ex *create_cq(struct ibv_context *context, struct ibv_cq_init_attr_ex *attributes) {
    return mock_create_cq(context, attributes);
}

/* Forgets what a queue has of a queue pair, or all. */
static void forget(struct queue *queue, uint32_t number, int all) {
    struct completion **place = &queue->first;
    queue->last = NULL;
    while (*place) {
        struct completion *entry = *place;
        if (all || entry->own == number) {
            *place = entry->next;
            free(entry);
        } else {
            queue->last = entry;
            place = &entry->next;
        }
    }
}

int ibv_destroy_cq(struct ibv_cq *verbs) {
    struct queue *queue = (struct queue *)verbs;
    pthread_mutex_lock(&lock);
    forget(queue, 0, 1);
    free(queue->current);
    free(queue);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* No interrupts: the one vector of the context says so. */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    (void)context;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { return (void)channel, 0; }

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **context) {
    return (void)channel, (void)queue, (void)context, -1;
}

void ibv_ack_cq_events(struct ibv_cq *queue, unsigned count) { (void)queue, (void)count; }

/* Queue pairs. */

struct ibv_qp *mock_create_qp(
    struct ibv_context *context, const struct ibv_qp_init_attr_ex *attributes, int reliable, int unsolicited
) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = own_host};
    socklen_t size = sizeof place;
    int file = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (file < 0 || bind(file, (struct sockaddr *)&place, size) || listen(file, 1024)) return NULL;
    getsockname(file, (struct sockaddr *)&place, &size);
    struct queue_pair *pair = zeroed(sizeof *pair);
    pair->verbs = (struct ibv_qp_ex){
        .qp_base = {
            .context = context, .qp_context = attributes->qp_context, .pd = attributes->pd,
            .send_cq = attributes->send_cq, .recv_cq = attributes->recv_cq, .qp_num = ntohs(place.sin_port),
            .state = IBV_QPS_RESET, .qp_type = attributes->qp_type,
        },
        .wr_rdma_read = wr_rdma_read, .wr_rdma_write = wr_rdma_write, .wr_rdma_write_imm = wr_rdma_write_imm,
        .wr_send = wr_send, .wr_send_imm = wr_send_imm, .wr_set_ud_addr = wr_set_ud_addr,
        .wr_set_inline_data = wr_set_inline_data, .wr_set_inline_data_list = wr_set_inline_data_list,
        .wr_set_sge = wr_set_sge, .wr_set_sge_list = wr_set_sge_list, .wr_start = wr_start,
        .wr_complete = wr_complete, .wr_abort = wr_abort,
    };
    pair->card = card_of(context);
    pair->sends = (struct queue *)attributes->send_cq;
    pair->receives = (struct queue *)attributes->recv_cq;
    pair->file = file;
    pair->reliable = reliable;
    pair->unsolicited = unsolicited;
    pair->retries = NEVER_GIVE_UP;
    pair->room = attributes->cap.max_send_wr < SENDS ? attributes->cap.max_send_wr : SENDS;
    pthread_mutex_lock(&lock);
    start_working();
    pair->serial = next_serial++;
    pair->next = queue_pairs;
    queue_pairs = pair;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = pair->serial};
    epoll_ctl(events, EPOLL_CTL_ADD, file, &event);
    pthread_mutex_unlock(&lock);
    return &pair->verbs.qp_base;
}

static struct ibv_qp *create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes) {
    if (attributes->qp_type != IBV_QPT_UD) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return mock_create_qp(context, attributes, 0, 0);
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *verbs) { return &((struct queue_pair *)verbs)->verbs; }

int ibv_modify_qp(struct ibv_qp *verbs, struct ibv_qp_attr *attributes, int mask) {
    struct queue_pair *pair = (struct queue_pair *)verbs;
    if (mask & IBV_QP_RNR_RETRY && !(abilities_of(pair->card) & EFADV_DEVICE_ATTR_CAPS_RNR_RETRY)) {
        return EOPNOTSUPP;
    }
    pthread_mutex_lock(&lock);
    if (mask & IBV_QP_STATE) verbs->state = attributes->qp_state;
    if (mask & IBV_QP_QKEY) pair->key = attributes->qkey;
    if (mask & IBV_QP_RNR_RETRY) pair->retries = attributes->rnr_retry;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ibv_query_qp_data_in_order(struct ibv_qp *verbs, enum ibv_wr_opcode opcode, uint32_t flags) {
    return (void)verbs, (void)opcode, (void)flags, 0;
}

int ibv_destroy_qp(struct ibv_qp *verbs) {
    struct queue_pair *pair = (struct queue_pair *)verbs;
    pthread_mutex_lock(&lock);
    for (struct link *link = links; link; link = link->next) {
        if (link->owner == pair) give_up(link, FLUSHED);
    }
    reap();
    forget(pair->sends, verbs->qp_num, 0);
    forget(pair->receives, verbs->qp_num, 0);
    for (struct work *buffer; (buffer = take_buffer(pair));) free(buffer);
    for (struct message *message; (message = pair->parked); free(message)) pair->parked = message->next;
    for (struct queue_pair **place = &queue_pairs; *place; place = &(*place)->next) {
        if (*place != pair) continue;
        *place = pair->next;
        break;
    }
    close(pair->file);
    pthread_mutex_unlock(&lock);
    wr_abort(&pair->verbs);
    free(pair);
    return 0;
}

/* Contexts. */

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    char path[128];
    snprintf(path, sizeof path, "/dev/infiniband/%s", device->dev_name);
    int node = open(path, O_RDWR | O_CLOEXEC);
    if (node < 0) return NULL;
    struct context *context = zeroed(sizeof *context);
    context->node = node;
    context->verbs.sz = sizeof context->verbs;
    context->verbs.query_port = query_port;
    context->verbs.create_cq_ex = create_cq;
    context->verbs.create_qp_ex = create_qp;
    context->verbs.context.device = device;
    context->verbs.context.num_comp_vectors = 1;
    context->verbs.context.cmd_fd = context->verbs.context.async_fd = -1;
    context->verbs.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->verbs.context.ops.post_recv = post_recv;
    return &context->verbs.context;
}

int ibv_close_device(struct ibv_context *verbs) {
    struct context *context = (void *)((char *)verbs - offsetof(struct context, verbs.context));
    close(context->node);
    free(context);
    return 0;
}
