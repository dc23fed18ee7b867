//! Sizes, amounts and names as people write them.

use std::net::{IpAddr, ToSocketAddrs};

use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::{Amount, names};

/// Bytes of `2GiB`, `500MB`, `4096`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let size: Result<bytesize::ByteSize, _> = text.parse();
    size.map(|size| size.as_u64()).map_err(|_| format!("`{text}` is not a size; write 512MiB or 2GiB"))
}

/// The same, and not nothing.
pub(crate) fn some_bytes(text: &str) -> Result<u64, String> {
    bytes(text).and_then(|size| if size > 0 { Ok(size) } else { Err("it is nothing; write 512MiB or 2GiB".into()) })
}

/// A number of CPUs or GPUs.
pub(crate) fn count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("`{text}` is not how many there are to offer; write a whole number, 0 for none"))
}

/// How many of something are kept: one or more.
pub(crate) fn some(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("`{text}` is not how many are kept; write a whole number, 1 or more"))
}

/// An address of this machine, also by name or in the brackets that it has before a port.
pub(crate) fn host(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().or_else(|_| {
        let found = (bare, 0).to_socket_addrs();
        let found = found.map_err(|error| format!("`{text}` is no address, and no name of one: {error}"))?;
        address_of(text, found.map(|found| found.ip()).collect())
    })
}

/// Of the addresses that a name has, that which others reach. Many machines have their own name for a loopback address.
fn address_of(name: &str, mut found: Vec<IpAddr>) -> Result<IpAddr, String> {
    found.sort_by_key(|found| (found.is_loopback(), found.is_ipv6()));
    match found.first() {
        Some(first) if !first.is_loopback() || name == "localhost" => Ok(*first),
        Some(first) => Err(format!("`{name}` is {first} here, which no other machine reaches: write the address")),
        None => Err(format!("`{name}` is the name of no address")),
    }
}

/// A part of a whole, from 0 to 1.
pub(crate) fn part(text: &str) -> Result<f64, String> {
    let part = text.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    part.ok_or_else(|| format!("`{text}` is no part from 0 to 1; write 0.95"))
}

/// A time such as `90s`, `10min` or `1h 30min`.
pub(crate) fn duration(text: &str) -> Result<std::time::Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 90s, 10min or 1h 30min"))
}

/// The same, and not at once.
pub(crate) fn some_time(text: &str) -> Result<std::time::Duration, String> {
    duration(text)
        .and_then(|time| if time.is_zero() { Err("it is no time at all; write 250ms".into()) } else { Ok(time) })
}

/// A time for people, without what nobody reads.
pub(crate) fn ago(time: std::time::Duration) -> String {
    let rounded = if time.as_secs() > 0 { std::time::Duration::from_secs(time.as_secs()) } else { time };
    humantime::format_duration(rounded).to_string()
}

/// `name=value` with an amount of a resource.
pub(crate) fn resource(text: &str) -> Result<(String, f64), String> {
    let (name, value) = named(text, "NAME=AMOUNT")?;
    let value = value.parse().map_err(|_| format!("`{value}` is not a number; write {name}=2 or {name}=0.5"))?;
    Amount::new(value).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), value))
}

/// The same, of a resource that a node offers beside those that have options of their own.
pub(crate) fn offered(text: &str) -> Result<(String, f64), String> {
    let (name, value) = resource(text)?;
    let option = match name.as_str() {
        CPU => "give --num-cpus",
        GPU => "give --num-gpus",
        MEMORY => "it is 70% of the machine's",
        _ if value > 0.0 => return Ok((name, value)),
        _ => return Err(format!("none of {name} is nothing to offer; leave it away, or write {name}=1")),
    };
    Err(format!("{name} is no resource of your own; {option}"))
}

/// `N`, or `LEAST:MOST`.
pub(crate) fn range(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number > 0);
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        (Some(least), Some(most)) => Err(format!("`{text}` is not LEAST:MOST; write {most}:{least}")),
        _ => Err(format!("`{text}` is neither a number above 0 nor LEAST:MOST")),
    }
}

/// `key=value`: a name, and what it stands for, which may be anything.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = named(text, "KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// `name=path`: what a file is called, and where it is.
pub(crate) fn file(text: &str) -> Result<(String, String), String> {
    let (name, path) = named(text, "NAME=PATH")?;
    if path.is_empty() {
        return Err(format!("there is no path behind the `=`; write {name}=PATH"));
    }
    Ok((name.to_owned(), path.to_owned()))
}

/// `key=value`, both names.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = pair(text)?;
    names::check(&value).map_err(|why| format!("{}: {why}", names::shortened(&value)))?;
    Ok((key, value))
}

/// What is before the first `=`, which is a name, and what is behind it.
fn named<'a>(text: &'a str, form: &str) -> Result<(&'a str, &'a str), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("write {form}"))?;
    if name.trim().is_empty() {
        return Err(format!("there is nothing before the `=`; write {form}"));
    }
    names::check(name).map_err(|why| format!("{}: {why}", names::shortened(name)))?;
    Ok((name, value))
}

/// The name of a namespace. A variable of a script that was not set names none.
pub(crate) fn namespace(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("it is empty; write the name of a namespace".into());
    }
    // What else it may not be, the head says.
    Ok(text.to_owned())
}

/// The first name that was given twice.
pub(crate) fn given_twice<T>(given: &[(String, T)]) -> Option<&str> {
    let mut known = std::collections::BTreeSet::new();
    given.iter().map(|(name, _)| name.as_str()).find(|name| !known.insert(*name))
}

/// Bytes for people.
pub(crate) fn shown(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn an_address_may_be_in_brackets_or_a_name() {
        assert_eq!(host("10.0.0.1"), Ok(IpAddr::from([10, 0, 0, 1])));
        assert_eq!((host("::1"), host("[::1]")), (Ok(Ipv6Addr::LOCALHOST.into()), Ok(Ipv6Addr::LOCALHOST.into())));
        assert!(host("localhost").unwrap().is_loopback());
        assert!(host("[10.0.0.1").unwrap_err().contains("`[10.0.0.1` is no address"));
        let [own, other] = [[127, 0, 1, 1], [10, 0, 0, 7]].map(IpAddr::from);
        assert_eq!(address_of("node-7", vec![own, Ipv6Addr::LOCALHOST.into(), other]), Ok(other));
        assert!(
            address_of("node-7", vec![own]).unwrap_err().contains("127.0.1.1 here, which no other machine reaches")
        );
    }

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("1.5KiB"), Ok(1536));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!((range("2"), range("1:4")), (Ok((2, 2)), Ok((1, 4))));
        assert!(range("0").is_err() && range("4:1").is_err() && range("x").is_err());
        assert!(bytes("many").is_err());
        assert!(bytes("3 elephants").is_err());
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(duration("1h 30min"), Ok(std::time::Duration::from_secs(5_400)));
        assert!(duration("soon").is_err());
    }

    #[test]
    fn a_namespace_has_a_name() {
        assert_eq!(namespace("team-a"), Ok("team-a".into()));
        assert!(namespace("").unwrap_err().contains("empty") && namespace(" ").is_err());
    }

    #[test]
    fn a_file_has_a_name_and_a_path() {
        assert_eq!(file("settings=a=b.json"), Ok(("settings".into(), "a=b.json".into())));
        for text in ["settings.json", "settings=", "=settings.json"] {
            assert!(file(text).unwrap_err().contains("=PATH"), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_offered_is_refused_with_what_to_write() {
        assert_eq!((count("0"), count("8")), (Ok(0), Ok(8)));
        for text in ["-1", "0.5", "many", ""] {
            assert!(count(text).unwrap_err().contains("write a whole number"), "{text}");
        }
        assert_eq!(some("1"), Ok(1));
        for text in ["0", "-1", "all"] {
            assert!(some(text).unwrap_err().contains("1 or more"), "{text}");
        }
        assert_eq!(offered("disk=0.5"), Ok(("disk".into(), 0.5)));
        let refused = [
            ("disk", "write NAME=AMOUNT"),
            ("=1", "nothing before the `=`"),
            ("disk=", "not a number"),
            ("disk=lots", "not a number"),
            ("disk=-1", "zero or more"),
            ("disk=NaN", "finite"),
            ("disk=0.00001", "finer"),
            ("disk=0", "nothing to offer"),
            ("CPU=4", "--num-cpus"),
            ("GPU=1", "--num-gpus"),
            ("memory=1", "70%"),
            ("two\nlines=1", "two"),
        ];
        for (text, why) in refused {
            let said = offered(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
        assert_eq!(resource("GPU=0"), Ok(("GPU".into(), 0.0)), "a quota of none");
        assert_eq!(pair("zone=a=b"), Ok(("zone".into(), "a=b".into())));
        assert!(pair("zone").is_err() && pair("=a").is_err());
        assert!(label("zone=a").is_ok() && label("zone=a\tb").is_err());
        let long = format!("SEARCHED={}", "/folder:".repeat(100));
        assert!(pair(&long).is_ok() && label(&long).is_err() && pair("LINES=one\ntwo").is_ok());
        assert_eq!((part("0"), part("0.95")), (Ok(0.0), Ok(0.95)));
        assert!(part("95").is_err() && part("-1").is_err() && part("NaN").is_err());
        assert!(some_bytes("0").is_err() && some_bytes("1MiB").is_ok());
        assert!(some_time("0s").is_err() && some_time("10ms").is_ok());
        assert_eq!(given_twice(&[("a".to_owned(), 1), ("b".to_owned(), 1), ("a".to_owned(), 2)]), Some("a"));
    }
}
