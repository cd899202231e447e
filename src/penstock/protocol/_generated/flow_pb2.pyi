from penstock.protocol._generated import consumer_pb2 as _consumer_pb2
from penstock.protocol._generated import gazette_pb2 as _gazette_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndpointType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INVALID: _ClassVar[EndpointType]
    SQLITE: _ClassVar[EndpointType]
    INGEST: _ClassVar[EndpointType]
    AIRBYTE_SOURCE: _ClassVar[EndpointType]
    FLOW_SINK: _ClassVar[EndpointType]
INVALID: EndpointType
SQLITE: EndpointType
INGEST: EndpointType
AIRBYTE_SOURCE: EndpointType
FLOW_SINK: EndpointType

class Slice(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class UUIDParts(_message.Message):
    __slots__ = ("producer_and_flags", "clock")
    PRODUCER_AND_FLAGS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    producer_and_flags: int
    clock: int
    def __init__(self, producer_and_flags: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class Inference(_message.Message):
    __slots__ = ("types", "string", "title", "description", "default_json", "secret", "exists")
    class Exists(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INVALID: _ClassVar[Inference.Exists]
        MUST: _ClassVar[Inference.Exists]
        MAY: _ClassVar[Inference.Exists]
        IMPLICIT: _ClassVar[Inference.Exists]
        CANNOT: _ClassVar[Inference.Exists]
    INVALID: Inference.Exists
    MUST: Inference.Exists
    MAY: Inference.Exists
    IMPLICIT: Inference.Exists
    CANNOT: Inference.Exists
    class String(_message.Message):
        __slots__ = ("content_type", "format", "is_base64", "max_length", "content_encoding")
        CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
        FORMAT_FIELD_NUMBER: _ClassVar[int]
        IS_BASE64_FIELD_NUMBER: _ClassVar[int]
        MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
        CONTENT_ENCODING_FIELD_NUMBER: _ClassVar[int]
        content_type: str
        format: str
        is_base64: bool
        max_length: int
        content_encoding: str
        def __init__(self, content_type: _Optional[str] = ..., format: _Optional[str] = ..., is_base64: _Optional[bool] = ..., max_length: _Optional[int] = ..., content_encoding: _Optional[str] = ...) -> None: ...
    TYPES_FIELD_NUMBER: _ClassVar[int]
    STRING_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_JSON_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    types: _containers.RepeatedScalarFieldContainer[str]
    string: Inference.String
    title: str
    description: str
    default_json: str
    secret: bool
    exists: Inference.Exists
    def __init__(self, types: _Optional[_Iterable[str]] = ..., string: _Optional[_Union[Inference.String, _Mapping]] = ..., title: _Optional[str] = ..., description: _Optional[str] = ..., default_json: _Optional[str] = ..., secret: _Optional[bool] = ..., exists: _Optional[_Union[Inference.Exists, str]] = ...) -> None: ...

class Projection(_message.Message):
    __slots__ = ("ptr", "field", "explicit", "is_partition_key", "is_primary_key", "inference")
    PTR_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPLICIT_FIELD_NUMBER: _ClassVar[int]
    IS_PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_PRIMARY_KEY_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_FIELD_NUMBER: _ClassVar[int]
    ptr: str
    field: str
    explicit: bool
    is_partition_key: bool
    is_primary_key: bool
    inference: Inference
    def __init__(self, ptr: _Optional[str] = ..., field: _Optional[str] = ..., explicit: _Optional[bool] = ..., is_partition_key: _Optional[bool] = ..., is_primary_key: _Optional[bool] = ..., inference: _Optional[_Union[Inference, _Mapping]] = ...) -> None: ...

class CollectionSpec(_message.Message):
    __slots__ = ("collection", "write_schema_uri", "key_ptrs", "uuid_ptr", "partition_fields", "projections", "ack_json_template", "write_schema_json", "partition_template", "read_schema_uri", "read_schema_json")
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    WRITE_SCHEMA_URI_FIELD_NUMBER: _ClassVar[int]
    KEY_PTRS_FIELD_NUMBER: _ClassVar[int]
    UUID_PTR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELDS_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    ACK_JSON_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    WRITE_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    PARTITION_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    READ_SCHEMA_URI_FIELD_NUMBER: _ClassVar[int]
    READ_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    collection: str
    write_schema_uri: str
    key_ptrs: _containers.RepeatedScalarFieldContainer[str]
    uuid_ptr: str
    partition_fields: _containers.RepeatedScalarFieldContainer[str]
    projections: _containers.RepeatedCompositeFieldContainer[Projection]
    ack_json_template: str
    write_schema_json: str
    partition_template: _gazette_pb2.JournalSpec
    read_schema_uri: str
    read_schema_json: str
    def __init__(self, collection: _Optional[str] = ..., write_schema_uri: _Optional[str] = ..., key_ptrs: _Optional[_Iterable[str]] = ..., uuid_ptr: _Optional[str] = ..., partition_fields: _Optional[_Iterable[str]] = ..., projections: _Optional[_Iterable[_Union[Projection, _Mapping]]] = ..., ack_json_template: _Optional[str] = ..., write_schema_json: _Optional[str] = ..., partition_template: _Optional[_Union[_gazette_pb2.JournalSpec, _Mapping]] = ..., read_schema_uri: _Optional[str] = ..., read_schema_json: _Optional[str] = ...) -> None: ...

class FieldSelection(_message.Message):
    __slots__ = ("keys", "values", "document", "field_config_json")
    class FieldConfigJsonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    FIELD_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    document: str
    field_config_json: _containers.ScalarMap[str, str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ..., document: _Optional[str] = ..., field_config_json: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Shuffle(_message.Message):
    __slots__ = ("group_name", "source_collection", "source_partitions", "source_uuid_ptr", "shuffle_key_ptrs", "uses_source_key", "shuffle_lambda", "deprecated_source_schema_uri", "filter_r_clocks", "read_delay_seconds", "priority", "validate_schema_json")
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COLLECTION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_UUID_PTR_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_KEY_PTRS_FIELD_NUMBER: _ClassVar[int]
    USES_SOURCE_KEY_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_LAMBDA_FIELD_NUMBER: _ClassVar[int]
    DEPRECATED_SOURCE_SCHEMA_URI_FIELD_NUMBER: _ClassVar[int]
    FILTER_R_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    source_collection: str
    source_partitions: _gazette_pb2.LabelSelector
    source_uuid_ptr: str
    shuffle_key_ptrs: _containers.RepeatedScalarFieldContainer[str]
    uses_source_key: bool
    shuffle_lambda: str
    deprecated_source_schema_uri: str
    filter_r_clocks: bool
    read_delay_seconds: int
    priority: int
    validate_schema_json: str
    def __init__(self, group_name: _Optional[str] = ..., source_collection: _Optional[str] = ..., source_partitions: _Optional[_Union[_gazette_pb2.LabelSelector, _Mapping]] = ..., source_uuid_ptr: _Optional[str] = ..., shuffle_key_ptrs: _Optional[_Iterable[str]] = ..., uses_source_key: _Optional[bool] = ..., shuffle_lambda: _Optional[str] = ..., deprecated_source_schema_uri: _Optional[str] = ..., filter_r_clocks: _Optional[bool] = ..., read_delay_seconds: _Optional[int] = ..., priority: _Optional[int] = ..., validate_schema_json: _Optional[str] = ...) -> None: ...

class MaterializationSpec(_message.Message):
    __slots__ = ("materialization", "endpoint_type", "endpoint_spec_json", "bindings", "shard_template", "recovery_log_template")
    class Binding(_message.Message):
        __slots__ = ("resource_spec_json", "resource_path", "collection", "field_selection", "delta_updates", "shuffle")
        RESOURCE_SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
        RESOURCE_PATH_FIELD_NUMBER: _ClassVar[int]
        COLLECTION_FIELD_NUMBER: _ClassVar[int]
        FIELD_SELECTION_FIELD_NUMBER: _ClassVar[int]
        DELTA_UPDATES_FIELD_NUMBER: _ClassVar[int]
        SHUFFLE_FIELD_NUMBER: _ClassVar[int]
        resource_spec_json: str
        resource_path: _containers.RepeatedScalarFieldContainer[str]
        collection: CollectionSpec
        field_selection: FieldSelection
        delta_updates: bool
        shuffle: Shuffle
        def __init__(self, resource_spec_json: _Optional[str] = ..., resource_path: _Optional[_Iterable[str]] = ..., collection: _Optional[_Union[CollectionSpec, _Mapping]] = ..., field_selection: _Optional[_Union[FieldSelection, _Mapping]] = ..., delta_updates: _Optional[bool] = ..., shuffle: _Optional[_Union[Shuffle, _Mapping]] = ...) -> None: ...
    MATERIALIZATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_TYPE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_LOG_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    materialization: str
    endpoint_type: EndpointType
    endpoint_spec_json: str
    bindings: _containers.RepeatedCompositeFieldContainer[MaterializationSpec.Binding]
    shard_template: _consumer_pb2.ShardSpec
    recovery_log_template: _gazette_pb2.JournalSpec
    def __init__(self, materialization: _Optional[str] = ..., endpoint_type: _Optional[_Union[EndpointType, str]] = ..., endpoint_spec_json: _Optional[str] = ..., bindings: _Optional[_Iterable[_Union[MaterializationSpec.Binding, _Mapping]]] = ..., shard_template: _Optional[_Union[_consumer_pb2.ShardSpec, _Mapping]] = ..., recovery_log_template: _Optional[_Union[_gazette_pb2.JournalSpec, _Mapping]] = ...) -> None: ...

class RangeSpec(_message.Message):
    __slots__ = ("key_begin", "key_end", "r_clock_begin", "r_clock_end")
    KEY_BEGIN_FIELD_NUMBER: _ClassVar[int]
    KEY_END_FIELD_NUMBER: _ClassVar[int]
    R_CLOCK_BEGIN_FIELD_NUMBER: _ClassVar[int]
    R_CLOCK_END_FIELD_NUMBER: _ClassVar[int]
    key_begin: int
    key_end: int
    r_clock_begin: int
    r_clock_end: int
    def __init__(self, key_begin: _Optional[int] = ..., key_end: _Optional[int] = ..., r_clock_begin: _Optional[int] = ..., r_clock_end: _Optional[int] = ...) -> None: ...

class DriverCheckpoint(_message.Message):
    __slots__ = ("driver_checkpoint_json", "rfc7396_merge_patch")
    DRIVER_CHECKPOINT_JSON_FIELD_NUMBER: _ClassVar[int]
    RFC7396_MERGE_PATCH_FIELD_NUMBER: _ClassVar[int]
    driver_checkpoint_json: bytes
    rfc7396_merge_patch: bool
    def __init__(self, driver_checkpoint_json: _Optional[bytes] = ..., rfc7396_merge_patch: _Optional[bool] = ...) -> None: ...

class OAuth2Spec(_message.Message):
    __slots__ = ("provider", "auth_url_template", "access_token_url_template", "access_token_body", "access_token_headers_json", "access_token_response_map_json", "refresh_token_url_template", "refresh_token_body", "refresh_token_headers_json", "refresh_token_response_map_json", "access_token_method", "refresh_token_method")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    AUTH_URL_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_URL_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_BODY_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_HEADERS_JSON_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_RESPONSE_MAP_JSON_FIELD_NUMBER: _ClassVar[int]
    REFRESH_TOKEN_URL_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    REFRESH_TOKEN_BODY_FIELD_NUMBER: _ClassVar[int]
    REFRESH_TOKEN_HEADERS_JSON_FIELD_NUMBER: _ClassVar[int]
    REFRESH_TOKEN_RESPONSE_MAP_JSON_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_METHOD_FIELD_NUMBER: _ClassVar[int]
    REFRESH_TOKEN_METHOD_FIELD_NUMBER: _ClassVar[int]
    provider: str
    auth_url_template: str
    access_token_url_template: str
    access_token_body: str
    access_token_headers_json: str
    access_token_response_map_json: str
    refresh_token_url_template: str
    refresh_token_body: str
    refresh_token_headers_json: str
    refresh_token_response_map_json: str
    access_token_method: str
    refresh_token_method: str
    def __init__(self, provider: _Optional[str] = ..., auth_url_template: _Optional[str] = ..., access_token_url_template: _Optional[str] = ..., access_token_body: _Optional[str] = ..., access_token_headers_json: _Optional[str] = ..., access_token_response_map_json: _Optional[str] = ..., refresh_token_url_template: _Optional[str] = ..., refresh_token_body: _Optional[str] = ..., refresh_token_headers_json: _Optional[str] = ..., refresh_token_response_map_json: _Optional[str] = ..., access_token_method: _Optional[str] = ..., refresh_token_method: _Optional[str] = ...) -> None: ...
