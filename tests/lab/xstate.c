/* Copyright: kubenode.proxy contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Lets an older user-mode Linux run on processors whose extended register state is larger than it knows.
 *
 * User-mode Linux before 6.13 keeps 2,696 bytes of extended state for each guest task (everything up to AVX-512 and
 * protection keys). Processors with AMX have about 11,000 bytes, and the host kernel refuses to set
 * NT_X86_XSTATE from a shorter buffer (EFAULT): the guest panics when it starts its first program. Preloaded
 * into linux.uml, this function pads such a request with zeros, the initial state of the registers that the guest
 * cannot use. Declares what it needs itself, so that a compiler without C library headers is enough.
 */
#define GET_REGISTER_SET 0x4204
#define SET_REGISTER_SET 0x4205
#define X86_EXTENDED_STATE 0x202
#define NEXT_OBJECT ((void *)-1L)

struct vector {
    void *base;
    unsigned long length;
};
typedef long (*ptrace_function)(long, long, void *, void *);
extern void *dlsym(void *, const char *);

static unsigned char state[1 << 16];
static unsigned long state_length;

long ptrace(long request, long pid, void *address, void *data)
{
    static ptrace_function next;
    struct vector *given = data;
    struct vector padded;
    unsigned long i;

    if (!next)
        next = (ptrace_function)dlsym(NEXT_OBJECT, "ptrace");
    if (request != SET_REGISTER_SET || (long)address != X86_EXTENDED_STATE)
        return next(request, pid, address, data);
    padded.base = state;
    if (!state_length) {
        padded.length = sizeof state;
        if (next(GET_REGISTER_SET, pid, address, &padded) < 0)
            return next(request, pid, address, data);
        state_length = padded.length;
        for (i = 0; i < sizeof state; i++)
            state[i] = 0;
    }
    if (given->length >= state_length)
        return next(request, pid, address, data);
    for (i = 0; i < given->length; i++)
        state[i] = ((unsigned char *)given->base)[i];
    padded.length = state_length;
    return next(request, pid, address, &padded);
}
