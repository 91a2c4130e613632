/* libefa.so.1 of the mock: the functions of <infiniband/efadv.h> that libfabric's provider calls. */
#include <errno.h>
#include <string.h>

#include "mock.h"

int efadv_query_device(struct ibv_context *context, struct efadv_device_attr *attributes, uint32_t size) {
    struct efadv_device_attr all = {0};
    mock_query_device(context, &all);
    memset(attributes, 0, size);
    memcpy(attributes, &all, size < sizeof all ? size : sizeof all);
    return 0;
}

int efadv_query_ah(struct ibv_ah *address, struct efadv_ah_attr *attributes, uint32_t size) {
    struct efadv_ah_attr all = {.ahn = mock_address_number(address)};
    memset(attributes, 0, size);
    memcpy(attributes, &all, size < sizeof all ? size : sizeof all);
    return 0;
}

struct ibv_cq_ex *efadv_create_cq(
    struct ibv_context *context, struct ibv_cq_init_attr_ex *attributes, struct efadv_cq_init_attr *more, uint32_t size
) {
    (void)more, (void)size;
    return mock_create_cq(context, attributes);
}

struct efadv_cq *efadv_cq_from_ibv_cq_ex(struct ibv_cq_ex *queue) { return mock_efa_cq(queue); }

struct ibv_qp *efadv_create_qp_ex(
    struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes, struct efadv_qp_init_attr *more, uint32_t size
) {
    (void)size;
    if (attributes->qp_type != IBV_QPT_DRIVER || more->driver_qp_type != EFADV_QP_DRIVER_TYPE_SRD) {
        errno = EINVAL;
        return NULL;
    }
    return mock_create_qp(context, attributes, 1, more->flags & EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV);
}

/* Which interconnects reach the memory: nothing is said. */
int efadv_query_mr(struct ibv_mr *memory, struct efadv_mr_attr *attributes, uint32_t size) {
    (void)memory;
    memset(attributes, 0, size);
    return 0;
}
