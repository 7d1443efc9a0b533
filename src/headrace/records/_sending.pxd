# The C types of _sending.py; see _codec.pxd for how the two files go together.

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef uint64_t _M
cdef uint64_t _SEED
cdef uint64_t _U32
cdef uint64_t _POSITIVE
cdef int _HEADER_SIZE
cdef int _OVERHEAD_BYTES
cdef int _FIRST_BYTES
cdef int64_t _MILLISECOND_NS
cdef bytes _NO_HEADERS

@cython.locals(
    length=Py_ssize_t, at=Py_ssize_t, rest=Py_ssize_t, h=uint64_t, k=uint64_t
)
cpdef int64_t murmur2(bytes data) except? -1

cpdef Py_ssize_t key_partition(bytes key, Py_ssize_t count) except? -1


cdef class Delivery


cdef class RecordBuffer:
    cdef public Py_ssize_t limit_bytes
    cdef public Py_ssize_t record_count
    cdef Py_ssize_t last_added
    cdef public int64_t base_timestamp
    cdef public int64_t max_timestamp
    cdef int64_t last_timestamp
    cdef list time_places
    cdef list times
    cdef public Py_ssize_t size_bytes
    cdef Py_ssize_t capacity
    cdef bytearray out
    cdef unsigned char* data

    @cython.locals(
        raw_key=bytes, raw_value=bytes, tail=bytes, key_length=Py_ssize_t, value_length=Py_ssize_t,
        count=Py_ssize_t, base=int64_t, delta=int64_t, body=Py_ssize_t, added=Py_ssize_t, pos=Py_ssize_t,
        data="unsigned char*",
    )
    cpdef Py_ssize_t append(self, int64_t timestamp, object key, object value, object headers) except -1
    cpdef bint promise(
        self, Delivery made, int64_t timestamp, object key, object value, object headers
    ) except -1
    @cython.locals(room=Py_ssize_t)
    cdef int grow(self, Py_ssize_t needed) except -1


@cython.no_gc
@cython.freelist(256)
cdef class Delivery:
    cdef public object batch
    cdef public Py_ssize_t place


@cython.final
@cython.no_gc
cdef class Pending(Delivery):
    cdef public object portal


@cython.final
cdef class Route:
    cdef public Py_ssize_t partition_count
    cdef public bint by_key
    cdef public Py_ssize_t sticky
    cdef public int64_t sticky_left
    cdef public list open_batches


@cython.final
cdef class SendPath:
    cdef public object portal
    cdef public object clock_ns
    cdef public int64_t memory_bytes_max
    cdef public int64_t held_bytes
    cdef public bint shut
    cdef public dict routes

    @cython.locals(
        route=Route, place=Py_ssize_t, sticky=bint, size=Py_ssize_t, timestamp=int64_t, batch=RecordBuffer,
        made=Delivery,
    )
    cpdef object append(
        self, str topic, object value, object key, object headers, object partition, object timestamp_ms
    )
    @cython.locals(made=Delivery)
    cpdef Delivery append_to(
        self, RecordBuffer batch, int64_t timestamp, object key, object value, object headers
    )
    @cython.locals(waiting=Pending)
    cdef Delivery blank(self)
    cpdef hold(self, int64_t size)


cdef bytes _as_bytes(str name, object value)
@cython.locals(body=bytearray, out=bytearray, count=Py_ssize_t, encoded=bytes, raw=bytes)
cdef bytes _encode_headers(object headers)
@cython.locals(raw=uint64_t)
cdef int _put_varint(bytearray out, int64_t value) except -1
@cython.locals(raw=uint64_t)
cdef Py_ssize_t _store_varint(unsigned char* data, Py_ssize_t pos, int64_t value) noexcept
@cython.locals(length=Py_ssize_t, source="const unsigned char*")
cdef Py_ssize_t _store_bytes(unsigned char* data, Py_ssize_t pos, bytes raw) except -1
@cython.locals(raw=uint64_t, size=Py_ssize_t)
cdef Py_ssize_t _varint_size(int64_t value) noexcept
