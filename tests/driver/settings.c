/* What the environment says of the cards, the driver and its faults. It is read once, when the library is loaded.
 *
 * Settings of cards may be lists divided by semicolons, one entry a card; the last holds for all further ones. */
#include "played.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Settings settings;

static const char *setting(const char *name) {
    char whole[64];
    snprintf(whole, sizeof whole, "PLAYED_%s", name);
    const char *text = getenv(whole);
    return text && *text ? text : NULL;
}

static double number(const char *name, double otherwise) {
    const char *text = setting(name);
    return text ? atof(text) : otherwise;
}

/* Copies the entry of one card. */
static int entry(const char *name, int device, char *to, size_t size) {
    const char *text = setting(name);
    if (!text)
        return 0;
    for (int i = 0; i < device && strchr(text, ';'); i++)
        text = strchr(text, ';') + 1;
    size_t length = strcspn(text, ";");
    if (length >= size)
        length = size - 1;
    memcpy(to, text, length);
    to[length] = 0;
    return 1;
}

static double number_of_card(const char *name, int device, double otherwise) {
    char text[64];
    return entry(name, device, text, sizeof text) && *text ? atof(text) : otherwise;
}

static void read_card(int device) {
    Card *card = &settings.cards[device];
    char capability[16];
    if (!entry("NAME", device, card->name, sizeof card->name))
        snprintf(card->name, sizeof card->name, "NVIDIA A100-SXM4-40GB");
    if (!entry("CAPABILITY", device, capability, sizeof capability) ||
        sscanf(capability, "%d.%d", &card->major, &card->minor) != 2) {
        card->major = 8;
        card->minor = 0;
    }
    card->num_multiprocessors = number_of_card("MULTIPROCESSORS", device, 108);
    card->total_bytes = number_of_card("TOTAL_MIB", device, 40337) * MIB;
    card->board_bytes = number_of_card("BOARD_MIB", device, card->total_bytes / MIB) * MIB;
    card->neighbour_bytes = number_of_card("NEIGHBOUR_MIB", device, 0) * MIB;
    card->l2_bytes = number_of_card("L2_MIB", device, 40) * MIB;
    card->context_bytes = number_of_card("CONTEXT_MIB", device, 400) * MIB;
    card->library_bytes = number_of_card("LIBRARY_MIB", device, 32) * MIB;
    card->fp32_flops = number_of_card("TFLOPS_FP32", device, 15) * 1e12;
    card->tf32_flops = number_of_card("TFLOPS_TF32", device, 80) * 1e12;
    card->bf16_flops = number_of_card("TFLOPS_BF16", device, 180) * 1e12;
    card->bytes_s = number_of_card("GB_S", device, 1300) * 1e9;
    double limit_w = number_of_card("POWER_LIMIT_W", device, 400);
    card->power_limit_mw = limit_w * 1e3;
    card->idle_w = number_of_card("IDLE_W", device, 0.3 * limit_w);
    card->kernel_w = number_of_card("KERNEL_W", device, 0.5 * limit_w);
    card->fp32_w = number_of_card("FP32_W", device, 0.8 * limit_w);
    card->tf32_w = number_of_card("TF32_W", device, 0.9 * limit_w);
    card->bf16_w = number_of_card("BF16_W", device, limit_w);
    card->sm_clock_mhz = number_of_card("SM_CLOCK_MHZ", device, 1410);
    card->memory_clock_mhz = number_of_card("MEMORY_CLOCK_MHZ", device, 1215);
}

static void read_faults(void) {
    settings.driver_version = number("DRIVER_VERSION", RUNTIME_VERSION);
    settings.nvml_error = number("NVML_ERROR", 0);
    const char *text = setting("KERNEL_ERROR"); /* ERROR:LAUNCH:PART OF THE KERNEL'S NAME */
    if (text)
        sscanf(text, "%d:%d:%63s", &settings.kernel_error, &settings.kernel_error_at, settings.kernel_error_part);
}

static void read_nccl(void) {
    settings.nccl_bytes = number("NCCL_MIB", 300) * MIB;
    settings.nccl_bytes_s = number("NCCL_GB_S", 100) * 1e9;
    settings.nccl_init_s = number("NCCL_INIT_S", 600);
    settings.nccl_notices_death = setting("NCCL_NOTICES") != NULL;
    settings.nccl_shares_device = setting("NCCL_SHARED_GPU") != NULL;
}

void read_settings(void) {
    settings.num_devices = number("DEVICES", 1);
    if (settings.num_devices > MAX_DEVICES)
        settings.num_devices = MAX_DEVICES;
    for (int i = 0; i < MAX_DEVICES; i++)
        read_card(i);
    settings.mig = setting("MIG") != NULL;
    settings.workspace_bytes = number("CUDNN_WORKSPACE_MIB", 16) * MIB;
    settings.readable_bytes = number("COPIES_UP_TO", 0);
    settings.launch_ns = number("LAUNCH_NS", 2000);
    settings.ns_per_thread = number("NS_PER_THREAD", 0.02);
    settings.link_bytes_s = number("LINK_GB_S", 20) * 1e9;
    read_faults();
    read_nccl();
    if (setting("STATE"))
        snprintf(settings.state, sizeof settings.state, "%s", setting("STATE"));
    if (setting("LOG"))
        settings.log = fopen(setting("LOG"), "ae");
}

void note(const char *format, ...) {
    if (!settings.log)
        return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(settings.log, "%d: ", getpid());
    vfprintf(settings.log, format, arguments);
    fputc('\n', settings.log);
    fflush(settings.log);
    va_end(arguments);
}
