/* cuDNN: plans that always exist (unless the books say that none does), with one workspace for all of them. */
#include "played.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_INITIALIZED = 1001, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum { NUMBER = 3, DESCRIPTOR = 15, INT32 = 23 };                          /* of cudnnBackendAttributeType_t */
enum { EXECUTION_PLAN = 5 };                                               /* of cudnnBackendDescriptorType_t */
enum { ENGINE_SHARED_MEMORY_USED = 304, PLAN_WORKSPACE_SIZE = 402 }; /* of cudnnBackendAttributeName_t */

int cudnnCreate(void **handle) {
    return load_library() ? NOT_INITIALIZED : new_handle(handle);
}

size_t cudnnGetVersion(void) {
    return 92000;
}

size_t cudnnGetCudartVersion(void) {
    return RUNTIME_VERSION;
}

int cudnnGetProperty(int type, int *value) {
    *value = type == 0 ? 9 : type == 1 ? 20 : 0;
    return 0;
}

const char *cudnnGetErrorString(int status) {
    switch (status) {
    case 0:
        return "CUDNN_STATUS_SUCCESS";
    case NOT_INITIALIZED:
        return "CUDNN_STATUS_NOT_INITIALIZED";
    case NOT_SUPPORTED:
        return "CUDNN_STATUS_NOT_SUPPORTED";
    case EXECUTION_FAILED:
        return "CUDNN_STATUS_EXECUTION_FAILED";
    default:
        return "CUDNN_STATUS_INTERNAL_ERROR";
    }
}

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size)
        *text = 0;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    new_handle(descriptor);
    *(int *)*descriptor = type;
    return 0;
}

int cudnnBackendFinalize(void *descriptor) {
    return books->without_cudnn_plan && *(int *)descriptor == EXECUTION_PLAN ? NOT_SUPPORTED : 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    if (count_launch("cudnn"))
        return EXECUTION_FAILED;
    work(20000);
    return 0;
}

/* Bytes of shared memory that an engine needs: more than any card has, where no graph is to have a plan. Whoever asks
 * for this gives up before it builds one; whoever does not fails in cudnnBackendFinalize. */
static int shared_memory_of_engine(void) {
    return books->without_cudnn_plan ? INT32_MAX : 0;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *found, void *values) {
    int has = type <= NUMBER || type == DESCRIPTOR || type == INT32;
    if (found)
        *found = has;
    if (!values || !asked)
        return 0;
    if (type == INT32)
        memset(values, 0, 4 * asked);
    if (type == NUMBER)
        memset(values, 0, 8 * asked);
    if (name == PLAN_WORKSPACE_SIZE)
        *(uint64_t *)values = settings.workspace_bytes;
    if (name == ENGINE_SHARED_MEMORY_USED)
        *(int32_t *)values = shared_memory_of_engine();
    return 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation,
                                                         void *x, size_t *bytes) {
    *bytes = 0;
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes) {
    *bytes = 0;
    return 0;
}

int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    *bytes = 1 << 20;
    return 0;
}
