"""Compiled kernels from text to Arrow columns, for all sources.

    byte_column      bytes of a column as input of kernels, and Arrow columns from their output
    located_values   locations of values in the bytes of records
    calendar         days since 1970
    kernels          usual notation of values, many at once
    single_value     any notation of a value, one by one

A source locates values, and calls a kernel for each column. Values in an unusual notation, and
invalid ones, are left to `single_value`, which gives the same value or the reason for its
rejection. No function rounds, except to the nearest double.
"""
