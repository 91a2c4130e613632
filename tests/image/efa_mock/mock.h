/* What the two libraries of the mock share: libefa.so.1 asks libibverbs.so.1 for what only EFA devices have. */
#ifndef EFA_MOCK_H
#define EFA_MOCK_H

#include <infiniband/efadv.h>

#pragma GCC visibility push(default)
void mock_query_device(struct ibv_context *context, struct efadv_device_attr *attributes);
uint16_t mock_address_number(struct ibv_ah *address);
struct ibv_cq_ex *mock_create_cq(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attributes);
struct efadv_cq *mock_efa_cq(struct ibv_cq_ex *queue);
struct ibv_qp *mock_create_qp(
    struct ibv_context *context, const struct ibv_qp_init_attr_ex *attributes, int reliable, int unsolicited
);
#pragma GCC visibility pop

#endif
