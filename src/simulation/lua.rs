//! The scripts of lua/, run as the server runs them: `redis` and `cjson` are what they may call.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use mlua::{Function, Lua, MultiValue, Table, Value};

use super::data::{Answer, Data};

/// A file to which each process of a seed adds the lines of lua/ that it ran.
const LINES: &str = "SOLOIST_LUA_LINES";

thread_local! {
    /// Lines of scripts that have run: the text, and the number.
    static RAN: RefCell<BTreeMap<String, BTreeSet<usize>>> = const { RefCell::new(BTreeMap::new()) };
}

fn note_lines(lua: &Lua) -> mlua::Result<()> {
    lua.set_hook(mlua::HookTriggers::EVERY_LINE, |_, debug| {
        if let (Some(line), Some(text)) = (debug.current_line(), debug.source().source) {
            RAN.with_borrow_mut(|ran| match ran.get_mut(&*text) {
                Some(lines) => _ = lines.insert(line),
                None => _ = ran.insert(text.into_owned(), BTreeSet::from([line])),
            });
        }
        Ok(mlua::VmState::Continue)
    })
}

/// Adds the lines of this thread's scripts that have run to the file that [`LINES`] names, if it names one.
pub(super) fn write_lines() {
    use std::io::Write as _;
    let Some(file) = std::env::var_os(LINES) else {
        return;
    };
    let all = RAN.with_borrow(|ran| {
        let lines = ran.iter().flat_map(|(text, lines)| {
            let all: Vec<&str> = text.trim_start_matches('=').lines().collect();
            lines
                .iter()
                .filter_map(move |n| Some(format!("{}\n", all.get(n - 1)?)))
        });
        lines
            .collect::<BTreeSet<String>>()
            .into_iter()
            .collect::<String>()
    });
    let mut file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(file)
        .expect("a file");
    file.write_all(all.as_bytes()).expect("write a file");
}

pub(super) struct Scripts {
    lua: Lua,
    known: BTreeMap<String, Function>,
}

impl Scripts {
    pub(super) fn new(data: &Rc<RefCell<Data>>) -> mlua::Result<Self> {
        let lua = Lua::new();
        let redis = lua.create_table()?;
        let of_call = data.clone();
        let call = lua.create_function(move |lua, args: MultiValue| {
            match of_call.borrow_mut().command(&words(args)?) {
                Answer::Error(text) => Err(mlua::Error::runtime(text)),
                answer => to_lua(lua, answer),
            }
        })?;
        redis.set("call", call.clone())?;
        let of_pcall = data.clone();
        let pcall = lua.create_function(move |lua, args: MultiValue| {
            let answer = of_pcall.borrow_mut().command(&words(args)?);
            to_lua(lua, answer)
        })?;
        redis.set("pcall", pcall)?;
        let error_reply = lua.create_function(|lua, text: mlua::LuaString| {
            let error = lua.create_table()?;
            error.set("err", text)?;
            Ok(error)
        })?;
        redis.set("error_reply", error_reply)?;
        lua.globals().set("redis", redis)?;
        let cjson = lua.create_table()?;
        cjson.set("null", Value::NULL)?;
        let decode = lua.create_function(|lua, text: mlua::LuaString| {
            let value: serde_json::Value =
                serde_json::from_slice(&text.as_bytes()).map_err(mlua::Error::external)?;
            from_json(lua, &value)
        })?;
        cjson.set("decode", decode)?;
        let encode = lua.create_function(|lua, value: Value| {
            let mut text = String::new();
            to_json(&value, &mut text)?;
            lua.create_string(text)
        })?;
        cjson.set("encode", encode)?;
        lua.globals().set("cjson", cjson)?;
        if std::env::var_os(LINES).is_some() {
            note_lines(&lua)?;
        }
        Ok(Self {
            lua,
            known: BTreeMap::new(),
        })
    }

    /// Forgets all scripts, as a server does that starts.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    pub(super) fn load(&mut self, text: &str) -> Answer {
        let sha = redis::Script::new(text).get_hash().to_owned();
        match self
            .lua
            .load(text)
            .set_name(format!("={text}"))
            .into_function()
        {
            Ok(function) => _ = self.known.insert(sha.clone(), function),
            Err(e) => return Answer::Error(format!("ERR {e}")),
        }
        Answer::Bulk(sha.into_bytes())
    }

    /// EVALSHA: the arguments behind its name.
    pub(super) fn call(&self, args: &[Vec<u8>]) -> Answer {
        let text = |n: usize| args.get(n).map(|a| String::from_utf8_lossy(a));
        let (Some(sha), Some(keys)) = (text(0), text(1).and_then(|n| n.parse::<usize>().ok()))
        else {
            return Answer::Error("ERR wrong arguments".to_owned());
        };
        let Some(function) = self.known.get(&*sha) else {
            return Answer::Error("NOSCRIPT No matching script.".to_owned());
        };
        let run = || {
            let list = |of: &[Vec<u8>]| {
                let all = of.iter().map(|a| self.lua.create_string(a));
                self.lua
                    .create_sequence_from(all.collect::<mlua::Result<Vec<_>>>()?)
            };
            let globals = self.lua.globals();
            globals.set("KEYS", list(&args[2..2 + keys])?)?;
            globals.set("ARGV", list(&args[2 + keys..])?)?;
            function.call::<Value>(())
        };
        match run() {
            Ok(value) => from_lua(&value),
            Err(e) => {
                let text = e.to_string();
                Answer::Error(format!("ERR {}", text.lines().next().unwrap_or_default()))
            }
        }
    }
}

fn words(args: MultiValue) -> mlua::Result<Vec<Vec<u8>>> {
    let word = |v: Value| match v {
        Value::String(s) => Ok(s.as_bytes().to_vec()),
        Value::Integer(n) => Ok(n.to_string().into_bytes()),
        Value::Number(n) => Ok(number(n).into_bytes()),
        other => Err(mlua::Error::runtime(format!(
            "an argument is a {}",
            other.type_name()
        ))),
    };
    args.into_iter().map(word).collect()
}

fn to_lua(lua: &Lua, answer: Answer) -> mlua::Result<Value> {
    Ok(match answer {
        Answer::Nil => Value::Boolean(false),
        Answer::Int(n) => Value::Number(n as f64),
        Answer::Bulk(bytes) => Value::String(lua.create_string(&bytes)?),
        Answer::Status(text) => single(lua, "ok", text)?,
        Answer::Error(text) => single(lua, "err", &text)?,
        Answer::List(all) => {
            let all = all.into_iter().map(|a| to_lua(lua, a));
            Value::Table(lua.create_sequence_from(all.collect::<mlua::Result<Vec<_>>>()?)?)
        }
    })
}

fn single(lua: &Lua, name: &str, text: &str) -> mlua::Result<Value> {
    let table = lua.create_table()?;
    table.set(name, text)?;
    Ok(Value::Table(table))
}

fn from_lua(value: &Value) -> Answer {
    match value {
        Value::Integer(n) => Answer::Int(*n),
        Value::Number(n) => Answer::Int(*n as i64),
        Value::String(s) => Answer::Bulk(s.as_bytes().to_vec()),
        Value::Boolean(true) => Answer::Int(1),
        Value::Table(t) => {
            if let Ok(Value::String(error)) = t.raw_get("err") {
                return Answer::Error(error.to_string_lossy());
            }
            let mut all = vec![];
            // As the server: up to the first nil.
            for n in 1.. {
                match t.raw_get(n) {
                    Ok(Value::Nil) | Err(_) => break,
                    Ok(value) => all.push(from_lua(&value)),
                }
            }
            Answer::List(all)
        }
        _ => Answer::Nil,
    }
}

fn from_json(lua: &Lua, value: &serde_json::Value) -> mlua::Result<Value> {
    use serde_json::Value as Json;
    Ok(match value {
        Json::Null => Value::NULL,
        Json::Bool(b) => Value::Boolean(*b),
        Json::Number(n) => Value::Number(n.as_f64().unwrap_or_default()),
        Json::String(s) => Value::String(lua.create_string(s)?),
        Json::Array(all) => {
            let all = all.iter().map(|v| from_json(lua, v));
            Value::Table(lua.create_sequence_from(all.collect::<mlua::Result<Vec<_>>>()?)?)
        }
        Json::Object(members) => {
            let table = lua.create_table()?;
            for (name, v) in members {
                table.raw_set(name.as_str(), from_json(lua, v)?)?;
            }
            Value::Table(table)
        }
    })
}

/// Fourteen digits, as cjson and Lua have it.
fn number(n: f64) -> String {
    if n == n.trunc() && n.abs() < 1e14 {
        return format!("{n:.0}");
    }
    let digits = 13 - n.abs().log10().floor().clamp(-20.0, 13.0) as i32;
    let text = format!("{n:.*}", digits.max(0) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn to_json(value: &Value, text: &mut String) -> mlua::Result<()> {
    match value {
        Value::Nil => text.push_str("null"),
        value if value.is_null() => text.push_str("null"),
        Value::Boolean(b) => text.push_str(if *b { "true" } else { "false" }),
        Value::Integer(n) => text.push_str(&n.to_string()),
        Value::Number(n) => text.push_str(&number(*n)),
        Value::String(s) => {
            text.push_str(&serde_json::Value::from(s.to_string_lossy()).to_string())
        }
        Value::Table(t) => table_to_json(t, text)?,
        other => {
            return Err(mlua::Error::runtime(format!(
                "cannot encode a {}",
                other.type_name()
            )));
        }
    }
    Ok(())
}

/// An empty table is an object, as with cjson.
fn table_to_json(table: &Table, text: &mut String) -> mlua::Result<()> {
    let length = table.raw_len();
    if length > 0 {
        for n in 1..=length {
            text.push(if n == 1 { '[' } else { ',' });
            to_json(&table.raw_get(n)?, text)?;
        }
        text.push(']');
        return Ok(());
    }
    let mut members: Vec<(String, Value)> = table.pairs().collect::<mlua::Result<_>>()?;
    // In whatever order Lua has them: an order of our own is one that a seed gives again.
    members.sort_by(|a, b| a.0.cmp(&b.0));
    text.push('{');
    for (n, (name, v)) in members.iter().enumerate() {
        if n > 0 {
            text.push(',');
        }
        text.push_str(&serde_json::Value::from(name.as_str()).to_string());
        text.push(':');
        to_json(v, text)?;
    }
    text.push('}');
    Ok(())
}
